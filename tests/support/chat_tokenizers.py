"""Tokenizers with the chat templates of known families, made without a download."""

import copy
from functools import cache
from typing import Any

from tokenizers import AddedToken

from tests.support.tiny_models import byte_level_tokenizer, sentencepiece_like_tokenizer

# As published, shortened by what concerns tools and pictures.
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Qwen 2.5 writes a turn of the system where none is given.
QWEN = (
    "{%- if messages[0]['role'] == 'system' %}{{- '<|im_start|>system\n' + messages[0]['content'] "
    "+ '<|im_end|>\n' }}{%- else %}{{- '<|im_start|>system\nYou are a helpful assistant."
    "<|im_end|>\n' }}{%- endif %}{%- for message in messages %}"
    "{%- if (message.role == 'user') or (message.role == 'system' and not loop.first) or "
    "(message.role == 'assistant') %}{{- '<|im_start|>' + message.role + '\n' + message.content + "
    "'<|im_end|>' + '\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
# Qwen 3 writes a block of thoughts before the last answer, which it asks for on request.
QWEN_3 = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' }}"
    "{%- if message.role == 'assistant' and loop.last %}"
    "{{- '<think>\n\n</think>\n\n' }}{%- endif %}"
    "{{- message.content + '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}"
    "{{- '<think>\n\n</think>\n\n' }}{%- endif %}{%- endif %}"
)
# GPT-OSS writes today's date, and answers in a channel that it does not ask for.
HARMONY = (
    "{{- '<|start|>system<|message|>Current date: ' + strftime_now('%Y-%m-%d') + '<|end|>' }}"
    "{%- for message in messages %}{{- '<|start|>' + message.role }}"
    "{%- if message.role == 'assistant' %}{{- '<|channel|>final' }}{%- endif %}"
    "{{- '<|message|>' + message.content + '<|end|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"
)
# DeepSeek R1 asks for thoughts, which it leaves out of answers.
DEEPSEEK = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}"
    "{{ '<User>' + message.content }}{% else %}{{ '<Assistant>' + message.content + eos_token }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<Assistant><think>\n' }}{% endif %}"
)
LLAMA_3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}"
    "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ "
    "message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}"
    "{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
    "{% endif %}"
)
GEMMA_2 = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
    "{% if (message['role'] == 'assistant') %}{% set role = 'model' %}"
    "{% else %}{% set role = message['role'] %}{% endif %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"
)
# Gemma 3 writes the instructions into the first turn of the user.
GEMMA_3 = (
    "{{ bos_token }}{%- if messages[0]['role'] == 'system' -%}"
    "{%- set first_user_prefix = messages[0]['content'] + '\n\n' -%}"
    "{%- set loop_messages = messages[1:] -%}{%- else -%}{%- set first_user_prefix = '' -%}"
    "{%- set loop_messages = messages -%}{%- endif -%}{%- for message in loop_messages -%}"
    "{%- if (message['role'] == 'assistant') -%}{%- set role = 'model' -%}{%- else -%}"
    "{%- set role = message['role'] -%}{%- endif -%}"
    "{{ '<start_of_turn>' + role + '\n' + (first_user_prefix if loop.first else '') }}"
    "{{ message['content'] | trim }}{{ '<end_of_turn>\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{'<start_of_turn>model\n'}}{%- endif -%}"
)
ZEPHYR = (
    "{% for message in messages %}\n{% if message['role'] == 'user' %}\n"
    "{{ '<|user|>\n' + message['content'] + eos_token }}\n"
    "{% elif message['role'] == 'system' %}\n"
    "{{ '<|system|>\n' + message['content'] + eos_token }}\n"
    "{% elif message['role'] == 'assistant' %}\n"
    "{{ '<|assistant|>\n'  + message['content'] + eos_token }}\n{% endif %}\n"
    "{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n"
    "{% endfor %}"
)
# Llama 2 puts BOS before every question, and a space before an answer but not after a question.
LLAMA_2 = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system_message = messages[0]['content'] %}{% else %}"
    "{% set loop_messages = messages %}{% set system_message = false %}{% endif %}"
    "{% for message in loop_messages %}"
    "{% if loop.index0 == 0 and system_message != false %}"
    "{% set content = '<<SYS>>\n' + system_message + '\n<</SYS>>\n\n' + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}"
    "{{ ' '  + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
TEMPLATES = {
    "ChatML": CHATML,
    "Qwen": QWEN,
    "Llama 3": LLAMA_3,
    "Gemma 2": GEMMA_2,
    "Gemma 3": GEMMA_3,
    "Zephyr": ZEPHYR,
    "Llama 2": LLAMA_2,
}
KINDS = {"byte-level": byte_level_tokenizer, "sentencepiece-like": sentencepiece_like_tokenizer}
SPECIAL = (
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<|user|>",
    "<|assistant|>",
    "<|system|>",
    "<eos>",
)


@cache
def chat_tokenizer(kind: str) -> Any:
    """A tokenizer without a template, which has the special tokens of all templates."""
    tokenizer = KINDS[kind]()
    tokens: Any = [AddedToken(token, special=True, normalized=False) for token in SPECIAL]
    tokenizer.add_tokens(tokens, special_tokens=True)
    tokenizer.eos_token = "<eos>"
    return tokenizer


def with_template(tokenizer: Any, name: str) -> Any:
    """A copy of a tokenizer with a template."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = TEMPLATES[name]
    return tokenizer


# Templates of models that think before they answer, of the same logic as the published ones.
# Gemma 4 asks with an empty thought, which stored answers lack, unless it is told to think.
GEMMA_4 = (
    "{{ bos_token }}{%- set turns = messages -%}"
    "{%- if enable_thinking | default(false) or messages[0].role == 'system' -%}"
    "{{- '<|turn>system\n' -}}{%- if enable_thinking | default(false) -%}{{- '<|think|>\n' -}}"
    "{%- endif -%}{%- if messages[0].role == 'system' -%}{{- messages[0].content | trim -}}"
    "{%- set turns = messages[1:] -%}{%- endif -%}{{- '<turn|>\n' -}}{%- endif -%}"
    "{%- for m in turns -%}{{- '<|turn>' + ('model' if m.role == 'assistant' else m.role) -}}"
    "{{- '\n' -}}"
    "{{- m.content | trim + '<turn|>\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|turn>model\n' -}}"
    "{%- if not enable_thinking | default(false) -%}{{- '<|channel>thought\n<channel|>' -}}"
    "{%- endif -%}{%- endif -%}"
)
# SmolLM 3 thinks by default. It reads a switch in the turn of the system, and takes it out there.
SMOLLM_3 = (
    "{%- set mode = '/no_think' if enable_thinking is defined and not enable_thinking else '/think'"
    " -%}{%- set own = '' -%}{%- if messages[0].role == 'system' -%}"
    "{%- set own = messages[0].content -%}{%- if '/no_think' in own -%}"
    "{%- set mode = '/no_think' -%}{%- elif '/think' in own -%}"
    "{%- set mode = '/think' -%}{%- endif -%}"
    "{%- set own = own.replace('/no_think', '').replace('/think', '').rstrip() -%}{%- endif -%}"
    "{{- '<|im_start|>system\nReasoning Mode: ' + mode + '\n\n' + (own or 'You help.') -}}"
    "{{- '<|im_end|>\n' -}}{%- set block = '' if mode == '/think' else '<think>\n\n</think>\n' -%}"
    "{%- for m in messages if m.role != 'system' -%}{{- '<|im_start|>' + m.role + '\n' -}}"
    "{{- block if m.role == 'assistant' -}}{{- m.content + '<|im_end|>\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' + block -}}{%- endif -%}"
)
# Nemotron Nano knows no variable: only the switch in a text. It opens a thought by default, and
# leaves thoughts out of all answers but the last.
NEMOTRON = (
    "{%- set ns = namespace(on=true) -%}{%- for m in messages if m.role != 'assistant' -%}"
    "{%- if '/think' in m.content -%}{%- set ns.on = true -%}"
    "{%- elif '/no_think' in m.content -%}{%- set ns.on = false -%}{%- endif -%}{%- endfor -%}"
    "{%- set begun = '<S11>Assistant\n' + ('<think>\n\n' if ns.on else '<think></think>') -%}"
    "{%- set system = messages[0].content if messages[0].role == 'system' else '' -%}"
    "{{- '<S10>System\n' + system.replace('/think', '').replace('/no_think', '').strip() -}}"
    "{{- '\n\n' -}}{%- for m in messages if m.role != 'system' -%}{%- if m.role == 'user' -%}"
    "{{- '<S11>User\n' + m.content.replace('/think', '').replace('/no_think', '').strip() -}}"
    "{{- '\n' -}}"
    "{%- else -%}{%- set word = m.content.split('</think>')[-1].strip() -%}"
    "{{- (begun if loop.last else '<S11>Assistant\n') + word + '\n<S12>\n\n' -}}"
    "{%- endif -%}{%- endfor -%}{%- if add_generation_prompt -%}{{- begun -}}{%- endif -%}"
)
# Granite is told in words that it shall think; where it asks nothing changes.
GRANITE = (
    "{%- set own = messages[0].content if messages[0].role == 'system' else 'You help.' -%}"
    "{{- '<|system|>' + own + (' Write your thoughts first.' if thinking else '') + '<eos>' -}}"
    "{%- for m in messages if m.role != 'system' -%}{{- '<|' + m.role + '|>' + m.content -}}"
    "{{- '<eos>' -}}{%- endfor -%}{{- '<|assistant|>' if add_generation_prompt -}}"
)
# Mistral writes the instructions into the last turn of the user.
MISTRAL = (
    "{{ bos_token }}{%- set ns = namespace(last=0) -%}"
    "{%- for m in messages if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endfor -%}"
    "{%- set own = messages[0].content + '\n\n' if messages[0].role == 'system' else '' -%}"
    "{%- for m in messages if m.role == 'user' -%}{%- set k = loop.index0 -%}"
    "{{- '[INST] ' + (own if k == ns.last else '') + m.content + '[/INST]' -}}"
    "{%- set rest = messages | selectattr('role', 'equalto', 'assistant') | list -%}"
    "{%- if k < rest | length -%}{{- ' ' + rest[k].content + eos_token -}}{%- endif -%}"
    "{%- endfor -%}"
)
