"""Chat templates: the built-in ones, and the Jinja text of a name or file."""

from __future__ import annotations

import re
from pathlib import Path

import jinja2
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from gpt2small_hf.data.chat.encoding import RENDER_SECONDS, within
from gpt2small_hf.errors import UsageError

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content + eos_token }}{% endgeneration %}"
    "{% else %}{{ message.content + eos_token }}{% endif %}"
    "{{ '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# The space before an answer is the model's to write: in a prompt it would be a token of its own, where " Yes" is one.
LLAMA2 = (
    "{{ bos_token }}"
    "{% set turn = namespace(system='') %}"
    "{% for message in messages %}"
    "{% if message.role == 'system' %}"
    "{% set turn.system = '<<SYS>>\n' + message.content + '\n<</SYS>>\n\n' %}"
    "{% elif message.role == 'user' %}"
    "{{ '[INST] ' + turn.system + message.content + ' [/INST]' }}{% set turn.system = '' %}"
    "{% else %}"
    "{% generation %}{{ ' ' + message.content + eos_token }}{% endgeneration %}"
    "{% endif %}"
    "{% endfor %}"
)
# Taori et al. 2023, as the reference series has it: no colon after "Input".
ALPACA = (
    "{% if messages[0].role == 'system' %}{{ messages[0].content }}"
    "{% else %}{{ 'Below is an instruction that describes a task. "
    "Write a response that appropriately completes the request.' }}{% endif %}"
    "{% for message in messages %}"
    "{% if message.role == 'user' %}"
    "{{ '\n\n### Instruction:\n' + message.content }}"
    "{% if message.input %}{{ '\n\n### Input\n' + message.input }}{% endif %}"
    "{% elif message.role == 'assistant' %}"
    "{{ '\n\n### Response:\n' }}{% generation %}{{ message.content + eos_token }}{% endgeneration %}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '\n\n### Response:\n' }}{% endif %}"
)
TEMPLATES = {"chatml": CHATML, "llama2": LLAMA2, "alpaca": ALPACA}
# What the tokenizer's own tokens are called in these formats, once they have tokens of their own.
ENDS = {"chatml": {"eos_token": "<|im_end|>"}, "llama2": {"bos_token": "<s>", "eos_token": "</s>"}}

GENERATION = re.compile(r"{%-?\s*generation\s*-?%}")


def find_template(template: str | None, tokenizer: PreTrainedTokenizerFast) -> str:
    """Return the Jinja text of a template: a name, a file, Jinja, or (None) the tokenizer's own, else ChatML.

    Raises: UsageError if it is unknown, not valid Jinja, or does not mark the assistant's answers.
    """
    if template is None:
        own = tokenizer.chat_template
        source = own if isinstance(own, str) else CHATML
    elif template in TEMPLATES:
        source = TEMPLATES[template]
    elif "{%" in template or "{{" in template:
        source = template
    elif Path(template).expanduser().is_file():
        try:
            source = Path(template).expanduser().read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise UsageError(
                f"the template {template} is not UTF-8: byte {error.start:,} cannot be decoded. Convert the file."
            ) from None
    else:
        raise UsageError(
            f"--template {template} is neither a name ({', '.join(TEMPLATES)}) nor a file nor Jinja. Pass one."
        )
    try:
        within(RENDER_SECONDS, lambda: render_jinja_template([[{"role": "user", "content": ""}]], chat_template=source))
    except jinja2.TemplateSyntaxError as error:
        raise UsageError(f"the chat template is not valid Jinja: {' '.join(str(error).split())}. Correct it.") from None
    except TimeoutError:
        raise UsageError(f"the chat template takes more than {RENDER_SECONDS} s for a chat. Correct it.") from None
    except Exception:  # any that the template's own code raises
        pass  # it may well want another chat or the tokenizer's tokens; `stop_tokens` tries that
    if not GENERATION.search(source):
        raise UsageError(
            "the chat template does not mark the assistant's answers, so the loss mask is unknown. Put "
            "{% generation %} before an answer and {% endgeneration %} after its end token, or use --template chatml."
        )
    return source
