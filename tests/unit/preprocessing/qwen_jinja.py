"""Chat templates that write as those of Qwen2.5, Qwen3-VL, Qwen3-VL-Thinking, Qwen3.5 and 3.6 do, made for the tests.

`{% generation %}` stands around what the assistant says, so that transformers tells which tokens it generates.
"""

_OFFER = r"""# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>{% for tool in tools %}{{ '\n' ~ (tool | tojson) }}{% endfor %}{{ '\n' }}</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""
_CALLS = r"""{%- macro calls(message, said) -%}
{%- for call in message.tool_calls or [] -%}
{%- set call = call.function if call.function is defined else call -%}
{{- '\n' if said or not loop.first -}}
{{- '<tool_call>\n{"name": "' ~ call.name ~ '", "arguments": ' -}}
{{- (call.arguments if call.arguments is string else call.arguments | tojson) ~ '}\n</tool_call>' -}}
{%- endfor -%}
{%- endmacro -%}
"""
_PARTS = r"""{%- macro written(content) -%}
{%- if content is string -%}{{- content -}}
{%- else -%}
{%- for part in content or [] -%}
{{- '<|vision_start|><|image_pad|><|vision_end|>' if part.type == 'image' else part.text -}}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
"""
_TEXTS = r"{%- macro written(content) -%}{{- '' ~ (content or '') -}}{%- endmacro -%}"
_RESULT = r"""
{%- elif message.role == 'tool' -%}
{{- '<|im_start|>user' if loop.first or messages[loop.index0 - 1].role != 'tool' -}}
{{- '\n<tool_response>\n' ~ written(message.content) ~ '\n</tool_response>' -}}
{{- '<|im_end|>\n' if loop.last or messages[loop.index0 + 1].role != 'tool' -}}
{%- endif -%}
{%- endfor -%}
"""
_SYSTEM = (
    r"""
{%- set system = messages[0].role == 'system' -%}
{%- if tools -%}
{{- '<|im_start|>system\n' ~ (written(messages[0].content) ~ '\n\n' if system else DEFAULT_BEFORE_TOOLS) -}}
"""
    + _OFFER
    + r"""{{- '<|im_end|>\n' -}}
{%- elif system -%}
{{- '<|im_start|>system\n' ~ written(messages[0].content) ~ '<|im_end|>\n' -}}
{%- else -%}
{{- DEFAULT -}}
{%- endif -%}
"""
)
_TURNS = r"""
{%- for message in messages -%}
{%- if message.role == 'user' -%}
{{- '<|im_start|>user\n' ~ written(message.content) ~ '<|im_end|>\n' -}}
{%- elif message.role == 'assistant' -%}
{{- '<|im_start|>assistant\n' -}}
{%- generation -%}
{{- written(message.content) ~ calls(message, message.content) ~ '<|im_end|>' -}}
{%- endgeneration -%}
{{- '\n' -}}
"""
_THINKING_TURNS = r"""
{%- set asked = namespace(last=messages | length - 1, searching=true) -%}
{%- for message in messages | reverse -%}
{%- set words = written(message.content) -%}
{%- set result = words.startswith('<tool_response>') and words.endswith('</tool_response>') -%}
{%- if asked.searching and message.role == 'user' and not result -%}
{%- set asked.last = messages | length - loop.index -%}
{%- set asked.searching = false -%}
{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}
{{- '<|im_start|>user\n' ~ written(message.content) ~ '<|im_end|>\n' -}}
{%- elif message.role == 'assistant' -%}
{%- set words, thought = written(message.content), '' -%}
{%- if message.reasoning_content is string -%}
{%- set thought = message.reasoning_content -%}
{%- elif '</think>' in words -%}
{%- set thought = words.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') -%}
{%- set words = words.split('</think>')[-1].lstrip('\n') -%}
{%- endif -%}
{{- '<|im_start|>assistant\n' -}}
{%- generation -%}
{%- if loop.index0 > asked.last and (loop.last or thought) -%}
{{- '<think>\n' ~ thought.strip('\n') ~ '\n</think>\n\n' ~ words.lstrip('\n') -}}
{%- else -%}
{{- words -}}
{%- endif -%}
{{- calls(message, words) ~ '<|im_end|>' -}}
{%- endgeneration -%}
{{- '\n' -}}
"""
_PARAMETERS_OFFER = r"""# Tools

You have access to the following functions:

<tools>{% for tool in tools %}{{ '\n' ~ (tool | tojson) }}{% endfor %}{{ '\n' }}</tools>

If you choose to call a function ONLY reply in the following format with NO suffix:

<tool_call>
<function=example_function_name>
<parameter=example_parameter_1>
value_1
</parameter>
<parameter=example_parameter_2>
This is the value for the second parameter
that can span
multiple lines
</parameter>
</function>
</tool_call>

<IMPORTANT>
Reminder:
- Function calls MUST follow the specified format: an inner <function=...></function> block must be nested within \
<tool_call></tool_call> XML tags
- Required parameters MUST be specified
- You may provide optional reasoning for your function call in natural language BEFORE the function call, but NOT after
- If there is no function call available, answer the question like normal with your current knowledge and do not tell \
the user about function calls
</IMPORTANT>""".replace("\\\n", "")
_PARAMETERS_SYSTEM = (
    r"""
{%- set system = written(messages[0].content) if messages[0].role == 'system' -%}
{%- if tools -%}
{{- '<|im_start|>system\n' -}}
"""
    + _PARAMETERS_OFFER
    + r"""{{- ('\n\n' ~ system if system else '') ~ '<|im_end|>\n' -}}
{%- elif messages[0].role == 'system' -%}
{{- '<|im_start|>system\n' ~ system ~ '<|im_end|>\n' -}}
{%- endif -%}
"""
)
_PARAMETERS_CALLS = r"""{%- macro calls(message, said) -%}
{%- for call in message.tool_calls or [] -%}
{%- set call = call.function if call.function is defined else call -%}
{{- '\n' if not loop.first else '\n\n' if said | trim -}}
{{- '<tool_call>\n<function=' ~ call.name ~ '>\n' -}}
{%- for name, value in call.arguments.items() -%}
{{- '<parameter=' ~ name ~ '>\n' ~ (VALUE) ~ '\n</parameter>\n' -}}
{%- endfor -%}
{{- '</function>\n</tool_call>' -}}
{%- endfor -%}
{%- endmacro -%}
"""


def _with_default(default: str) -> str:
    begun = f"<|im_start|>system\n{default}<|im_end|>\n" if default else ""
    before = f"{default}\n\n" if default else ""
    return _SYSTEM.replace("DEFAULT_BEFORE_TOOLS", repr(before)).replace("DEFAULT", repr(begun))


QWEN25 = _CALLS + _TEXTS + _with_default("You are a helpful assistant.") + _TURNS + _RESULT
"""Of Qwen2.5-VL's tokenizer: texts alone."""
QWEN3 = _CALLS + _PARTS + _with_default("") + _TURNS + _RESULT
THINKING = _CALLS + _PARTS + _with_default("") + _THINKING_TURNS + _RESULT
_TRIMMED = _PARTS.replace("macro written(", "macro untrimmed(") + (
    "{%- macro written(content) -%}{{- untrimmed(content) | trim -}}{%- endmacro -%}"
)
_ALWAYS_THINKING_TURNS = (
    _THINKING_TURNS.replace("asked.last and (loop.last or thought)", "asked.last")
    .replace(r"thought.strip('\n')", "thought | trim")
    .replace(r"words.lstrip('\n')", "words")
)


def _by_parameters(value: str) -> str:
    calls = _PARAMETERS_CALLS.replace("VALUE", value)
    return calls + _TRIMMED + _PARAMETERS_SYSTEM + _ALWAYS_THINKING_TURNS + _RESULT


QWEN35 = _by_parameters("value | tojson if value is mapping or value is sequence and value is not string else value")
QWEN36 = _by_parameters("value if value is string else value | tojson")
WITHOUT_TOOLS = (
    _PARTS
    + _with_default("You are a helpful assistant.").split("{%- if tools -%}")[0]
    + (
        r"""
{%- if not system -%}{{- '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' -}}{%- endif -%}
{%- for message in messages -%}
{{- '<|im_start|>' ~ message.role ~ '\n' ~ written(message.content) ~ '<|im_end|>\n' -}}
{%- endfor -%}
"""
    )
)
"""Of Qwen2-VL's and Qwen2.5-VL's processors: what has no content is an empty turn, and tools pass unread."""
