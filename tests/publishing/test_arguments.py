"""Flags of `push`: values, and errors of one line."""

import pytest

from gpt2small_hf.errors import UsageError
from gpt2small_hf.publishing.arguments import parse_arguments


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("runs/short tiny", "tiny lacks the account it belongs to. Write USER/tiny."),
        ("runs/short you/ti--ny", "you/ti--ny is not a repository name: "),
        ("runs/short you/tiny --private --public", "--private cannot be combined with --public: choose one."),
        (
            "runs/short you/tiny --revision next --all_checkpoints",
            "--revision cannot be combined with --all_checkpoints: ",
        ),
        ("runs/short you/tiny --create_pr --revision next", "--revision cannot be combined with --create_pr: "),
        ("runs/short you/tiny --tag main", "--tag main is the name of a branch. Use another."),
        ("runs/short you/tiny --tag next --revision next", "--tag next is the name of a branch. Use another."),
        ("runs/short you/tiny --tag v1/2", "--tag v1/2: use letters, digits, dots, dashes and underscores"),
        ("runs/short you/tiny --revision refs/pr/1", "--revision refs/pr/1: use letters, digits, dots, dashes"),
        ("runs/short you/tiny --revision a..b", "--revision a..b: use letters, digits"),
        ("runs/short you/tiny --revision a.lock", "--revision a.lock: use letters, digits"),
        ("runs/short you/tiny --tag v1.", "--tag v1.: use letters, digits"),
        ("runs/short you/tiny --tag HEAD", "--tag HEAD: use letters, digits"),
        (f"runs/short you/tiny --revision {'0a' * 20}", "0a: use letters, digits"),
        ("runs/short you/tiny --tag v1 --create_pr", "--tag cannot be combined with --create_pr: tag the commit"),
        (
            "runs/short you/tiny --code_only --all_checkpoints",
            "--code_only cannot be combined with --all_checkpoints: ",
        ),
        (
            "runs/short you/tiny --code_only --also_native",
            "--code_only cannot be combined with --also_native: it updates",
        ),
        ("runs/short you/tiny --code_only --replace", "--code_only cannot be combined with --replace: it keeps the"),
        (
            "runs/short you/tiny --license apache",
            "--license apache is not a license of the Hub. Did you mean apache-2.0?",
        ),
        ("runs/short you/tiny --license Ours", "is not a license of the Hub. "),
        ("runs/short you/tiny --license other", "--license other needs --license_name, and --license_link or "),
        ("runs/short you/tiny --license other --license_name a", "and --license_link or --license_file."),
        (
            "runs/short you/tiny --license other --license_name A --license_link https://a.b",
            "--license_name A: use lower",
        ),
        (
            "runs/short you/tiny --license other --license_name a --license_link a.b",
            "--license_link a.b is not an address. Write https://…, or use --license_file a.b.",
        ),
        ("runs/short you/tiny --license mit --license_name a", "describe --license other. Add it, or leave them out."),
        ("runs/short you/tiny --license mit --license_file gone", "--license_file gone cannot be read (No such file"),
        ("runs/short you/tiny --license_file gone", "--license_file needs --license: name the license of that text"),
        (
            "runs/short you/tiny --allow_secret hunter22",
            "--allow_secret has a value of 8 characters that is not a fingerprint.",
        ),
        ("runs/short you/tiny --developers a{b", "--developers 'a{b': use one line of text without"),
        ("runs/short you/tiny --contact https://ada:pw@host", "--contact: the card is public, so leave user, password"),
        ("runs/short you/tiny --contact Ask<https://ada:pw@host>", "--contact: the card is public, so leave user"),
        ("runs/short you/tiny --developers https://ada:pw@host", "--developers: the card is public, so leave user"),
        ("runs/short you/tiny --origin somebody", "--origin somebody is neither a Hub id (USER/REPO) nor an address"),
        ("runs/short you/tiny --origin ../b", "--origin ../b is neither a Hub id (USER/REPO) nor an address"),
        ("runs/short you/tiny --origin https://t0k3n@host/x", "--origin: the card is public, so leave user, password"),
        ("runs/short you/tiny --origin https://host/x?token=a", "--origin: the card is public, so leave user, passwo"),
        (
            "runs/short you/tiny --license other --license_name a --license_link https://a:b@host/x",
            "--license_link: the card is public, so leave user, password and query (?…) out of the address.",
        ),
        ("runs/short you/tiny --publik", "--publik is not a flag. Did you mean --public?"),
    ],
)
def test_invalid_flags_are_refused_in_one_line(words, said):
    with pytest.raises(UsageError) as refusal:
        parse_arguments(words.split())
    assert said in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_values_of_a_list_end_where_they_have_another_form():
    secrets = ["0123456789ab", "0123456789ac"]
    args = parse_arguments(["--allow_secret", *secrets, "--language", "en", "de", "runs/short", "you/tiny"])
    assert (str(args.RUN), args.REPO) == ("runs/short", "you/tiny")
    assert (args.allow_secret, args.language) == (secrets, ["en", "de"])


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("https://huggingface.co/ada/tiny/", "ada/tiny"),
        ("ada/tiny", "ada/tiny"),
        ("https://huggingface.co/papers/1706.03762", "https://huggingface.co/papers/1706.03762"),
        ("https://hf.co/datasets/x", "https://hf.co/datasets/x"),
        ("https://hf.co/ada/tiny/tree/v1", "https://hf.co/ada/tiny/tree/v1"),
        ("https://example.com/@ada/x#weights", "https://example.com/@ada/x#weights"),
    ],
)
def test_origin_of_a_model_page_becomes_a_hub_id(given, kept):
    assert parse_arguments(["runs/short", "you/tiny", "--origin", given]).origin == kept
