"""A value that a rule of `secrets.yml` matched → whether it is a secret, not a word, an identifier or a placeholder.

A regular expression cannot tell a random value (`kqzvxwpjmhtbgdfc`) from an identifier (`tokenizer_config`). Here the
letter pairs of a value are compared with those of English text and of code.
"""

import re
from itertools import pairwise

FREQUENT = frozenset(
    first + second
    for first, *following in """
    abcdgilmnprstuvy baelou caehiklot dadeios eacdefilmnprstvxy faeior gehors haeiot iacdefglmnorstvz ke ladefilostuy
    maeiop nacdegiost ocdfklmnoprstuw paelortu qu racdegimnorstuy saehiopstu taehiorstuy uelmnprst vaei waehio yeo ze
    """.split()  # noqa: SIM905
    for second in following
)
"""The 180 most frequent letter pairs: 91 % of the pairs in English books and in Python code, 27 % of random ones."""
UNUSUAL_PAIRS = 5
"""Least number of unusual pairs in a random value. `is_random` finds 99.87 % of random values of 12 letters and digits,
and 99.0 % of those of 12 lower-case letters and digits (measured with 400,000 values each).
"""
UNUSUAL_PAIRS_OF_LETTERS = 7
"""The same for letters of one case, of which `psychologist` and `subscribed` have five."""
PASSPHRASE = 16
"""Least length of a password without a digit (`correcthorsebattery`). A shorter word may be a variable or a label."""

_PLACEHOLDER = re.compile(
    r"example|xxx|your|change_?me|placeholder|redacted|environ|getenv|token_id|://|self\.|args\."
    r"|\.\w*(?:password|passwd|secret|token|key)$",  # an attribute: `form1.password`
    re.IGNORECASE,
)
_CHOSEN = re.compile(
    r"(?:pass(?:word|wd|phrase|code)?|pwd|secret(?:[_ -]?key)?|credentials?|authorization\W+\w+)"
    r"(?P<between>\W+|\W*is\W+)$",
    re.IGNORECASE,
)
"""The end of what stands before a value that people choose. Others are made by machines, at random."""
_IN_MANUALS = {"password", "passwd", "pass", "pwd", "secret", "token"}


def is_random(value: str) -> bool:
    """Return whether a value was made by a machine: it has many letter pairs that words and identifiers do not have."""
    if re.fullmatch(r"[0-9a-f]{32,}|[0-9A-F]{32,}", value):  # their pairs vary most
        return len(set(value)) > UNUSUAL_PAIRS
    pairs = [first + second for first, second in pairwise(value)]
    pairs = [pair for pair in pairs if pair.isascii() and pair.isalnum()]
    unusual = sum(map(_is_unusual, pairs))
    is_mixed = any(map(str.isdigit, value)) or re.search("[a-z][A-Z]", value)
    return unusual >= max(UNUSUAL_PAIRS if is_mixed else UNUSUAL_PAIRS_OF_LETTERS, len(pairs) / 3)


def _is_unusual(pair: str) -> bool:
    if pair.isdigit():
        return False
    return pair.lower() not in FREQUENT or (pair[0].islower() and pair[1].isupper())


def is_credential(value: str, before: str, after: str) -> bool:
    """Return whether a value that follows a credential's name is one.

    Of keys and tokens a random value is, anywhere. A password may also be a number, a word with a digit or a special
    character in it, or a passphrase; in a sentence (`The password: hunter22 is weak.`) a word with a number is not.
    Text that continues with another assignment (`… user: bob`) is not a sentence. `before` ends with the name.
    """
    bare = re.sub(r"&\w+=.*", "", value).rstrip(".,:!?*")  # without the next part of a query
    if _PLACEHOLDER.search(bare) or len(set(bare.lower())) < 4:
        return False
    if is_random(bare):
        return True
    name = _CHOSEN.search(before)
    if name is None:
        return False
    if re.search(r"[A-Za-z0-9][!@#%^+?]+[A-Za-z0-9]", bare):
        return True
    is_sentence = re.search(r":\*{0,2}\s+$", name["between"]) and (
        re.match(r"[,;)]*[ \t]+(?![\w-]+\s?[:=])\w", after) or re.search(r"secret:\s+$", before, re.IGNORECASE)
    )
    if is_sentence or re.search(r"\bis\s+$", before):
        return False
    return bool(re.search("[0-9]", bare) or re.fullmatch(rf"[a-z-]{{{PASSPHRASE},}}", bare))


def is_password(value: str, before: str) -> bool:
    """Return whether what stands between `scheme://user:` and `@host` is a password, not a variable or a manual's word.

    `password` is one in the address of a database, which is installed with such words.
    """
    of_manual = value.lower() in _IN_MANUALS and re.search(r"https?://[^\s/]*$", before)
    return value[0] not in "${%*" and "example" not in value.lower() and not of_manual


def is_secret_value(rule: str, value: str, before: str, after: str) -> bool:
    """Return whether a match of a rule is a secret, as the rule's id says (see `secrets.yml`)."""
    if rule == "ours.named.address":
        return is_password(value, before)
    if rule.startswith("ours.named."):
        return is_credential(value, before, after)
    return not rule.startswith("ours.random.") or is_random(value)
