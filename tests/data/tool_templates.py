"""Short chat templates that print the tool markup of models whose own templates are not among the
fixtures.
"""

from __future__ import annotations

LLAMA = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'tool' %}{{ '<|start_header_id|>ipython<|end_header_id|>\n\n' + "
    "(m.content | tojson) + '<|eot_id|>' }}"
    "{% else %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}"
    "{% if tools and loop.first %}{{ 'Functions: ' + (tools | tojson) + '\n\n' }}{% endif %}"
    "{% if m.tool_calls %}"
    "{% if m.tool_calls | length > 1 %}{{ raise_exception('one call at a time') }}{% endif %}"
    "{% set call = m.tool_calls[0].function %}"
    "{{ '{\"name\": \"' + call.name + '\", \"parameters\": ' + (call.arguments | tojson) + '}' }}"
    "{% else %}{{ m.content | trim }}{% endif %}"
    "{{ '<|eom_id|>' if m.tool_calls and environment else '<|eot_id|>' }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
"""Llama 3.x. With ``environment`` a call ends with another token than an answer."""

MISTRAL = (
    "{{ bos_token }}{% if tools %}{{ '[AVAILABLE_TOOLS]' + (tools | tojson) + "
    "'[/AVAILABLE_TOOLS]' }}{% endif %}{% for m in messages %}"
    "{% if m.role == 'system' %}{{ '[SYSTEM_PROMPT]' + m.content + '[/SYSTEM_PROMPT]' }}"
    "{% elif m.role == 'user' %}{{ '[INST]' + m.content + '[/INST]' }}"
    "{% elif m.role == 'tool' %}{{ '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}"
    "{% else %}{{ m.content }}{% for call in m.tool_calls or [] %}"
    "{{ '[TOOL_CALLS]' + call.function.name + '[ARGS]' + (call.function.arguments | tojson) }}"
    "{% endfor %}{{ eos_token }}{% endif %}{% endfor %}"
)
"""Mistral since Small 3.1 and Magistral."""

_GEMMA_VALUE = (
    "{% macro value(v) %}"
    "{% if v is none %}null{% elif v is string %}{{ QUOTE + v + QUOTE }}"
    "{% elif v is boolean %}{{ 'true' if v else 'false' }}"
    "{% elif v is mapping %}{{ '{' }}{% for k, x in v | dictsort %}"
    "{{ k }}:{{ value(x) }}{{ ',' if not loop.last }}{% endfor %}{{ '}' }}"
    "{% elif v is sequence %}[{% for x in v %}{{ value(x) }}{{ ',' if not loop.last }}{% endfor %}]"
    "{% else %}{{ v }}{% endif %}{% endmacro %}"
)

GEMMA = (
    _GEMMA_VALUE.replace("QUOTE", "'<|\"|>'") + "{{ bos_token }}"
    "{% if tools %}{{ '<|turn>system\n<|tool>' + (tools | tojson) + '<tool|><turn|>\n' }}"
    "{% endif %}"
    "{% set ns = namespace(after='') %}{% for m in messages %}"
    "{% if m.role == 'tool' %}"
    "{{ ('<|tool_response>' if ns.after != 'call') }}{{ 'response:' + m.name + '{value:' + "
    "value(m.content) + '}<tool_response|>' }}{% set ns.after = 'result' %}"
    "{% else %}"
    "{% if m.role != 'assistant' or not ns.after %}"
    "{{ '<|turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}{% endif %}"
    "{% set ns.after = '' %}"
    "{{ m.content | trim }}{% for call in m.tool_calls or [] %}"
    "{{ '<|tool_call>call:' + call.function.name + value(call.function.arguments) + "
    "'<tool_call|>' }}{% endfor %}"
    "{% if m.tool_calls %}{{ '<|tool_response>' }}{% set ns.after = 'call' %}"
    "{% else %}{{ '<turn|>\n' }}{% endif %}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt and not ns.after %}{{ '<|turn>model\n' }}{% endif %}"
)
"""Gemma 4: the token that starts the results ends the turn with the calls."""

FUNCTION_GEMMA = (
    _GEMMA_VALUE.replace("QUOTE", "'<escape>'") + "{{ bos_token }}"
    "{% if tools %}{{ '<start_of_turn>developer\n' + (tools | tojson) + '<end_of_turn>\n' }}"
    "{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}"
    "{{ '<start_of_turn>developer\n<start_function_response>response:' + m.name + '{value:' + "
    "value(m.content) + '}<end_function_response><end_of_turn>\n' }}"
    "{% else %}"
    "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}"
    "{{ m.content | trim }}{% for call in m.tool_calls or [] %}"
    "{{ '<start_function_call>call:' + call.function.name + value(call.function.arguments) + "
    "'<end_function_call>' }}{% endfor %}{{ '<end_of_turn>\n' }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
"""FunctionGemma's markup of calls, in turns of Gemma."""
