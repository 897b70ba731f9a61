"""Chat templates for composed models: each image as `<image>` and a newline, the answer in `{% generation %}` markers.

The end-of-turn token is inside the markers, so a model trained on the assistant's tokens learns to stop. A template is
chosen by the turn tokens that the tokenizer has, so a language model keeps the turns it was trained with.
"""

from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase


# Puts the text of `message` into ns.text: a string as it is; a list of parts one after another.
_READ_CONTENT = """\
{%- set ns = namespace(text='') -%}
{%- if message['content'] is string -%}
{%- set ns.text = message['content'] -%}
{%- elif message['content'] -%}
{%- for part in message['content'] -%}
{%- if part is string -%}{%- set ns.text = ns.text + part -%}
{%- elif part['type'] == 'text' -%}
{%- set ns.text = ns.text + (part['text'] if 'text' in part else part['content']) -%}
{%- elif part['type'] in ('image', 'image_url') -%}{%- set ns.text = ns.text + '@IMAGE@\\n' -%}
{%- else -%}{{- raise_exception('This model takes text and images, not parts of type ' + part['type'] + '.') -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
"""

_TURNS = (
    """\
@BOS@{%- for message in messages -%}
"""
    + _READ_CONTENT
    + """\
{{- '@START@' + message['role'] + '@AFTER_ROLE@' -}}
{%- if message['role'] == 'assistant' -%}
{% generation %}{{- ns.text + '@END@' -}}{% endgeneration %}
{%- else -%}
{{- ns.text + '@END@' -}}
{%- endif -%}
{{- '@AFTER_TURN@' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '@START@assistant@AFTER_ROLE@' -}}{%- endif -%}
"""
)

# Gemma has no system turn: its text stands at the beginning of the first user turn, as in Gemma's own template.
_GEMMA = (
    """\
@BOS@{%- set state = namespace(system='') -%}
{%- for message in messages -%}
"""
    + _READ_CONTENT
    + """\
{%- if message['role'] == 'system' -%}
{%- set state.system = state.system + ns.text + '\\n\\n' -%}
{%- elif message['role'] == 'assistant' -%}
{{- '<start_of_turn>model\\n' -}}
{% generation %}{{- ns.text + '<end_of_turn>' -}}{% endgeneration %}
{{- '\\n' -}}
{%- else -%}
{{- '<start_of_turn>' + message['role'] + '\\n' + state.system + ns.text + '<end_of_turn>\\n' -}}
{%- set state.system = '' -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<start_of_turn>model\\n' -}}{%- endif -%}
"""
)

_LLAVA = (
    """\
@BOS@{%- for message in messages -%}
"""
    + _READ_CONTENT
    + """\
{%- if message['role'] == 'assistant' -%}
{{- 'ASSISTANT:' -}}
{% generation %}{{- ' ' + ns.text + '@END@' -}}{% endgeneration %}
{%- elif message['role'] == 'system' -%}
{{- ns.text + ' ' -}}
{%- else -%}
{{- 'USER: ' + ns.text + ' ' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'ASSISTANT:' -}}{%- endif -%}
"""
)


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template and the token that ends a turn in it."""

    family: str
    text: str
    end_of_turn: str


def chat_template_for(tokenizer: PreTrainedTokenizerBase, image_token: str = "<image>") -> ChatTemplate:
    """The chat template whose turn tokens the tokenizer has.

    Families: `chatml` (Qwen, SmolLM2), `llama3`, `gemma`, and `llava` ("USER: ... ASSISTANT: ...", as in LLaVA-1.5,
    ended by the tokenizer's eos token) for every other. No template adds a system turn of its own. A tokenizer that puts
    a bos token before a text gets a template that does so too, so that both ways of encoding agree.

    Raises:
        ValueError: the `llava` template is needed, and the tokenizer has no eos token to end an answer with.
    """
    vocabulary = tokenizer.get_vocab()
    if {"<|im_start|>", "<|im_end|>"} <= vocabulary.keys():
        family, end = "chatml", "<|im_end|>"
        turns = {"START": "<|im_start|>", "AFTER_ROLE": "\\n", "END": end, "AFTER_TURN": "\\n"}
        text = _TURNS
    elif {"<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"} <= vocabulary.keys():
        family, end = "llama3", "<|eot_id|>"
        turns = {"START": "<|start_header_id|>", "AFTER_ROLE": "<|end_header_id|>\\n\\n", "END": end, "AFTER_TURN": ""}
        text = _TURNS
    elif {"<start_of_turn>", "<end_of_turn>"} <= vocabulary.keys():
        family, end, turns, text = "gemma", "<end_of_turn>", {}, _GEMMA
    elif tokenizer.eos_token:
        family, end = "llava", tokenizer.eos_token
        turns, text = {"END": end}, _LLAVA
    else:
        raise ValueError(
            "The tokenizer has neither turn tokens that are known nor an eos token to end an answer with."
        )
    for word, value in {"BOS": _bos(tokenizer), "IMAGE": image_token, **turns}.items():
        text = text.replace(f"@{word}@", value)
    return ChatTemplate(family, text, end)


def _bos(tokenizer: PreTrainedTokenizerBase) -> str:
    ids = tokenizer("a")["input_ids"]
    starts_with_bos = tokenizer.bos_token_id is not None and ids[:1] == [tokenizer.bos_token_id]
    return "{{- bos_token -}}\n" if starts_with_bos else ""
