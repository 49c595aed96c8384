"""Chat templates in the style of models that people fine-tune, and conversations for them."""

LLAMA3 = """{{- bos_token }}
{%- if not date_string is defined %}{% set date_string = "1 Jan 2026" %}{% endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|im_start|>system\\n\\nToday Date: " + date_string + "\\n" }}
{%- if tools is not none %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message }}
{{- "<|im_end|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|im_start|>' + message['role'] + '\\n\\n' + message['content'] | trim + '<|im_end|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}
            {{- raise_exception("one tool call at a time") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|im_start|>assistant\\n\\n{"name": "' + tool_call.name + '", "parameters": ' }}
        {{- tool_call.arguments | tojson }}
        {{- "}<|im_end|>" }}
    {%- else %}
        {{- "<|im_start|>ipython\\n\\n" + (message.content | tojson) + "<|im_end|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n\\n' }}
{%- endif %}
"""

QWEN = """{%- set ns = namespace(last=messages|length - 1, found=false) %}
{%- for message in messages[::-1] %}
    {%- if message.role == "user" and not ns.found %}
        {%- set ns.found = true %}
        {%- set ns.last = (messages|length - 1) - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "assistant" %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last and loop.last %}
            {{- '<think>\\n\\n</think>\\n\\n' }}
        {%- endif %}
        {{- message.content.split('</think>')[-1].lstrip('\\n') + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""

GEMMA = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set first_user_prefix = messages[0]['content'] + '\\n\\n' -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- set role = "model" if message['role'] == 'assistant' else message['role'] -%}
    {{ '<|im_start|>' + role + '\\n' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'image' -%}{%- continue -%}{%- endif -%}
            {{ item['text'] | trim }}
        {%- endfor -%}
    {%- endif -%}
    {{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{'<|im_start|>model\\n'}}
{%- endif -%}
"""

MISTRAL = """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + " [/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + " [/INST]" }}
        {%- endif %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"] | trim + eos_token }}
    {%- endif %}
{%- endfor %}
"""

MARKED = """{% for message in messages %}
<|im_start|>{{ message.role }}
{% if message.role == 'assistant' %}
{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}

{% else %}
{{ message.content }}<|im_end|>
{% endif %}
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}
"""

SYSTEM = {"role": "system", "content": "You add numbers. "}
ASKED, ANSWERED = {"role": "user", "content": "two and two?"}, {"role": "assistant", "content": "four."}
AGAIN, LAST = {"role": "user", "content": "and \N{SNOWMAN}?"}, {"role": "assistant", "content": " the row\n"}
PARTS = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "two and two?"}]}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "é": "<'&>"}}}]
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": {"a": 2}}}]}
RESULT = {"role": "tool", "content": "4"}
CHAT = [ASKED, ANSWERED, AGAIN, LAST]

CASES = {
    "llama3": (LLAMA3, [[ASKED], CHAT, [SYSTEM, *CHAT], [ASKED, CALL, RESULT, ANSWERED]]),
    "qwen": (QWEN, [[ASKED], CHAT, [SYSTEM, *CHAT]]),
    "gemma": (GEMMA, [[ASKED], CHAT, [SYSTEM, *CHAT], [PARTS, ANSWERED]]),
    "mistral": (MISTRAL, [[ASKED], CHAT, [SYSTEM, *CHAT]]),
    "marked": (MARKED, [[ASKED], CHAT, [SYSTEM, *CHAT]]),
}
"""{name: (template, conversations)}."""
