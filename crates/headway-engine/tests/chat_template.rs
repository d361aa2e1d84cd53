//! Chat templates as transformers renders them: globals, Python's methods and printing, limits, mutated templates.

use headway_engine::text::{ChatTemplate, Message, TemplateSource, TextError, fuzz_chat};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant, UNIX_EPOCH};

fn tokens() -> BTreeMap<String, String> {
    BTreeMap::from([("bos_token".into(), "<s>".into()), ("eos_token".into(), "</s>".into())])
}

fn template(text: &str) -> ChatTemplate {
    ChatTemplate::new(&TemplateSource::single(text), &tokens()).unwrap_or_else(|e| panic!("{text}: {e}"))
}

fn vars(value: Value) -> Map<String, Value> {
    value.as_object().unwrap().clone()
}

fn chat() -> Vec<Message> {
    vec![Message::system("S"), Message::user(" Hi "), Message::assistant("Yo"), Message::user("Bye")]
}

fn render(text: &str) -> String {
    template(text).render(&chat(), true, &Map::new()).unwrap_or_else(|e| panic!("{text}: {e}"))
}

#[test]
fn expressions_are_as_in_jinja2_with_python_values() {
    for (text, expected) in [
        ("{{ bos_token }}{{ eos_token }}", "<s></s>"),
        ("{{ add_generation_prompt }} {{ none }} {{ 1.0 }} {{ 10 ** 16 * 1.0 }}", "True None 1.0 1e+16"),
        ("{{ ['a', 1, none, true] }} {{ {'k': \"it's\"} }}", "['a', 1, None, True] {'k': \"it's\"}"),
        ("{{ messages[0].role }} {{ messages[-1]['content'] }} {{ messages|length }}", "system Bye 4"),
        ("{% for m in messages[::-1] %}{{ m.content }}|{% endfor %}", "Bye|Yo| Hi |S|"),
        (
            "{% set rest = messages[1:] %}{{ rest[0].role }} {{ rest|length }} {{ rest[-1].content }}",
            "user 3 Bye",
        ),
        (
            "{{ (messages|list)[:-1]|length }} {{ messages[1:][0].role }} {{ (messages[::-1])[0].content }}",
            "3 user Bye",
        ),
        ("{{ 'abcdef'[::-1] }} {{ 'abcdef'[4:1:-2] }} {{ 'abc'[0] }} {{ 'abc'[-1] }}", "fedcba ec a c"),
        ("{{ 'abc'[2:0:-1] }} {{ [][::-1]|length }} {{ ''[::-1] }}|{{ [1, 2, 3][5:0:-1] }}", "cb 0 |[3, 2]"),
        ("{{ messages[1].content.strip() }}|{{ ' x'.lstrip() }}|{{ 'x\\n'.rstrip('\\n') }}", "Hi|x|x"),
        ("{{ 'a<b>c'.split('<b>')[-1] }} {{ 'a b c'.rsplit(' ', 1)|join('/') }}", "c a b/c"),
        (
            "{{ 'abc'.startswith('ab') }} {{ 'abc'.endswith(('x', 'bc')) }} {{ 'aXa'.replace('a', 'b', 1) }}",
            "True True bXa",
        ),
        (
            "{{ 'aaa'.count('') }} {{ 'aaa'.count('a') }} {{ 'xyz'.find('z') }} {{ 'äöz'.find('z') }}",
            "4 3 2 2",
        ),
        (
            "{{ 'ab'.removeprefix('a') }} {{ 'k=v'.partition('=')|last }} {{ '7'.zfill(3) }} {{ ''.isdigit() }}",
            "b v 007 False",
        ),
        ("{% for k, v in {'a': 1, 'b': 2}.items() %}{{ k }}{{ v }}{% endfor %}", "a1b2"),
        ("{% for k, v in {'b': 1, 'a': 2}|items %}{{ k }}{{ v }}{% endfor %}", "b1a2"),
        (
            "{{ messages[0].get('x', 'none') }} {{ messages[0].get('x') is none }} {{ messages[0].x is defined }}",
            "none True False",
        ),
        ("{{ {'a': [1, 2.5], 'é': none}|tojson }}", r#"{"a": [1, 2.5], "é": null}"#),
        ("{{ {'b': 1, 'a': {}}|tojson(indent=2) }}", "{\n  \"b\": 1,\n  \"a\": {}\n}"),
        ("{{ [1, 'é<>&\\'']|tojson(separators=(',', ':'), ensure_ascii=true) }}", r#"[1,"\u00e9<>&'"]"#),
        ("{{ {'b': 1, 'a': 2}|tojson(sort_keys=true) }}", r#"{"a": 2, "b": 1}"#),
        (
            "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
            "4",
        ),
        (
            "{% for m in messages %}{% if loop.index0 == 1 %}{% continue %}{% endif %}{% if loop.last %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
            "SYo",
        ),
        (
            "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}{% endif %}{% endfor %}",
            "Yo",
        ),
        ("{% macro f(x, y='d') %}[{{ x }}{{ y }}]{% endmacro %}{{ f(1) }}{{ f(2, y='e') }}", "[1d][2e]"),
        (
            "{{ messages|map(attribute='role')|join(',') }} {{ messages|selectattr('role', 'equalto', 'user')|list|length }}",
            "system,user,assistant,user 2",
        ),
        ("{{ messages|rejectattr('role', 'in', ['user'])|map(attribute='content')|list }}", "['S', 'Yo']"),
        ("{{ tools is none }} {{ documents is none }} {{ date_string is defined }}", "True True False"),
        ("{{ 'yes' if tools else 'no' }} {{ undefined_thing }}|{{ 'a' ~ 1 ~ 'b' }}", "no |a1b"),
        (
            "{{ 'x' in 'xyz' }} {{ 'role' in messages[0] }} {{ messages[0] is mapping }} {{ 'a' is string }}",
            "True True True True",
        ),
        (
            "{{ '%s-%d'|format('a', 3) }} {{ '{} {}'.format('a', 'b') }} {{ 'k: {}'.format(1) }}",
            "a-3 a b k: 1",
        ),
        (
            "{{ 'a\\nb'|indent(2) }} {{ ' t '|trim }} {{ 'hELLO'|capitalize }} {{ 'ab'|upper }}",
            "a\n  b t Hello AB",
        ),
        ("{% raw %}{% generation %}{% endraw %}{{ '{% generation %}' }}", "{% generation %}{% generation %}"),
        ("a\n  {% if true %}\nb\n  {% endif %}\nc\n", "a\nb\nc"),
        ("{% call(x) f(3) %}{{ x }}{% endcall %}", "3"),
    ] {
        let text = if text.contains("call(x)") {
            format!("{{% macro f(n) %}}{{{{ caller(n) }}}}{{% endmacro %}}{text}")
        } else {
            text.to_string()
        };
        assert_eq!(render(&text), expected, "{text}");
    }
}

#[test]
fn the_clock_can_be_fixed() {
    let clock = Arc::new(|| UNIX_EPOCH + Duration::from_secs(1_721_952_000));
    let template = template("{{ strftime_now('%d %b %Y') }}").with_clock(clock);
    assert_eq!(template.render(&[], false, &Map::new()).unwrap(), "26 Jul 2024");
}

#[test]
fn a_date_is_supplied_or_left_to_the_template() {
    let text = "{% if date_string is not defined %}{% set date_string = '26 Jul 2024' %}{% endif %}{{ date_string }}";
    assert_eq!(render(text), "26 Jul 2024");
    let given = vars(json!({"date_string": "1 Jan 2026"}));
    assert_eq!(template(text).render(&[], false, &given).unwrap(), "1 Jan 2026");
}

#[test]
fn templates_refuse_in_their_own_words() {
    let template =
        template("{% if messages[0].role == 'system' %}{{ raise_exception('No system role') }}{% endif %}");
    let error = template.render(&chat(), false, &Map::new()).unwrap_err();
    assert_eq!(error, TextError::Refused { message: "No system role".into() });
    assert_eq!(template.render(&chat()[1..], false, &Map::new()).unwrap(), "");
}

#[test]
fn several_templates_are_chosen_by_name() {
    let list = json!([{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T{{ tools[0].name }}"}]);
    let source = TemplateSource::from_json(&list).unwrap();
    let template = ChatTemplate::new(&source, &tokens()).unwrap();
    assert_eq!(template.render(&[], false, &Map::new()).unwrap(), "D");
    let tools = vars(json!({"tools": [{"name": "add"}]}));
    assert_eq!(template.render(&[], false, &tools).unwrap(), "Tadd");
    let error = TemplateSource::from_json(&json!([{"name": "x"}])).unwrap_err();
    assert!(error.to_string().contains("tokenizer_config.json"), "{error}");
    let odd = json!([{"name": "a", "template": ""}, {"name": "b", "template": ""}]);
    let error = ChatTemplate::new(&TemplateSource::from_json(&odd).unwrap(), &tokens()).unwrap_err();
    assert!(error.to_string().contains("none called default"), "{error}");
}

#[test]
fn a_model_without_a_template_says_what_to_do() {
    let error = ChatTemplate::new(&TemplateSource::default(), &tokens()).unwrap_err();
    assert_eq!(error, TextError::NoChatTemplate);
    assert!(error.to_string().contains("--chat"), "{error}");
}

#[test]
fn tool_calls_reach_the_template() {
    let message: Message = serde_json::from_value(json!({
        "role": "assistant", "content": null,
        "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1, "y": "é"}}}]
    }))
    .unwrap();
    let text = "{% for c in messages[0].tool_calls %}{{ c.function.name }}{{ c.function.arguments|tojson }}{% endfor %}\
                {{ messages[0].content is none }}";
    let out = template(text).render(&[message], false, &Map::new()).unwrap();
    assert_eq!(out, r#"f{"x": 1, "y": "é"}True"#);
}

/// Loops, recursion, nesting and sizes that a hostile model file could ask for: an error, soon, and no crash.
#[test]
fn runaway_templates_end_with_an_error() {
    let long_sum = format!("{{{{ 1{} }}}}", "+1".repeat(200_000));
    let deep = format!("{{{{ {}1{} }}}}", "(".repeat(100_000), ")".repeat(100_000));
    let too_large = "x".repeat((1 << 20) + 1);
    for (text, may_render) in [
        ("{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}", false),
        ("{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}", false),
        (
            "{% set ns = namespace(x=[]) %}{% for i in range(99999) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x }}",
            false,
        ),
        (
            "{% set ns = namespace(x=[]) %}{% for i in range(99999) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x|tojson }}",
            false,
        ),
        (
            "{% set ns = namespace(x=[]) %}{% for i in range(99999) %}{% set ns.x = [ns.x] %}{% endfor %}{{ (ns.x ~ '')|length }}",
            true,
        ),
        (
            "{% set ns = namespace(x=[]) %}{% for i in range(99999) %}{% set ns.x = {'k': ns.x} %}{% endfor %}done",
            true,
        ),
        (
            "{% set ns = namespace(x=[]) %}{% for i in range(99) %}{% for j in range(99999) %}{% set ns.x = [ns.x] %}\
             {% endfor %}{% endfor %}",
            false,
        ),
        (
            "{% set ns = namespace(x=[]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
            false,
        ),
        (
            "{% set ns = namespace(x=[]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}\
             {{ ns.x|tojson|length }}",
            false,
        ),
        (
            "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}done",
            false,
        ),
        (
            "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}done",
            false,
        ),
        (
            "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x]|join %}{% endfor %}",
            false,
        ),
        (
            "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x.replace('a', ns.x) %}{% endfor %}",
            false,
        ),
        ("{{ 'x' * 1000000000 }}", false),
        ("{{ '%1000000000d'|format(1) }}", false),
        ("{{ '%*d'|format(1000000000, 1) }}", false),
        ("{{ '{:>1000000000}'.format('a') }}", false),
        ("{{ '{:{}}'.format('a', 1000000000) }}", false),
        ("{{ 'a\nb'|indent(1000000000000) }}", false),
        ("{{ 'a\nb'|indent(width=1000000000000) }}", false),
        ("{{ [1]|batch(1000000000000)|list }}", true),
        ("{{ [1]|slice(1000000000000)|list }}", false),
        ("{{ [1]|tojson(indent=1000000000000) }}", false),
        ("{{ 'a'.ljust(1000000000000) }}", false),
        ("{% for i in range(99999) %}{{ 'x' * 10000 }}{% endfor %}", false),
        (long_sum.as_str(), true),
        (deep.as_str(), false),
        (too_large.as_str(), false),
        ("{% include 'default' %}", false),
        ("{% extends 'default' %}", false),
    ] {
        let begin = Instant::now();
        let result = ChatTemplate::new(&TemplateSource::single(text), &tokens())
            .and_then(|t| t.render(&chat(), true, &Map::new()));
        let shown: String = text.chars().take(60).collect();
        assert!(begin.elapsed() < Duration::from_secs(20), "{shown}: {:?}", begin.elapsed());
        match result {
            Ok(_) => assert!(may_render, "{shown}: rendered"),
            Err(error) => {
                let error = error.to_string();
                assert!(!error.contains("engine failed") && error.lines().count() == 1, "{shown}: {error}");
            }
        }
    }
}

/// A xorshift generator: the mutations are the same in every run.
struct Random(u64);

impl Random {
    fn next(&mut self, below: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % below.max(1) as u64) as usize
    }
}

const SEEDS: &[&str] = &[
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' }}{% endfor %}",
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}{% else %}{% set rest = messages %}\
     {% endif %}{% for m in rest %}{% generation %}{{ m.content | trim }}{% endgeneration %}{% endfor %}",
    "{%- if tools %}{%- for t in tools %}{{- t | tojson(indent=4) }}{%- endfor %}{%- endif %}{{ strftime_now('%d %b %Y') }}",
    "{% set ns = namespace(a='', n=0) %}{% for m in messages[::-1] %}{% set ns.n = ns.n + loop.index %}{% if ns.n > 2 %}\
     {% break %}{% endif %}{% endfor %}{{ ns.n ~ ns.a }}",
    "{% macro f(x) %}{{ x.split('</think>')[-1].lstrip('\\n') if x is string else x|items|list }}{% endmacro %}\
     {{ f(messages[0].content) }}{{ f({'a': 1.5}) }}",
    "{% raw %}{{ no }}{% endraw %}{# c #}{{ raise_exception('no') if not messages else '%s %5d'|format('a', 3) }}",
];

const TOKENS: &[&str] = &[
    "{{",
    "}}",
    "{%",
    "%}",
    "-",
    "|",
    "(",
    ")",
    "[",
    "]",
    "[::-1]",
    "[1:]",
    ".",
    "'",
    "\"",
    "messages",
    "m",
    "tojson",
    "indent=",
    "99999",
    "-1",
    "0",
    "1e308",
    " in ",
    " not ",
    " is ",
    "loop",
    "for ",
    "endfor",
    "if ",
    "endif",
    "set ",
    "macro ",
    "endmacro",
    "generation",
    "endgeneration",
    "raw",
    "namespace",
    "range(",
    "~",
    "+",
    "*",
    "%",
    "//",
    "**",
    ".split(",
    ".strip(",
    ".items()",
    ".count('')",
    "format",
    "é",
    "\u{10ffff}",
    "\n",
    "\0",
    "user\n",
    "{}",
    "<",
    "strftime_now('%",
    "none",
    "true",
    "tools",
    "items",
    "dictsort",
    "groupby",
    "batch(",
    "slice(",
    "sort",
    "unique",
];

fn mutate(random: &mut Random) -> Vec<u8> {
    let mut data = SEEDS[random.next(SEEDS.len())].as_bytes().to_vec();
    for message in ["\0system\nBe kind.", "\0user\nHi </think>\n there", "\0assistant\nYo {{ 7 }}", "\0tool"]
    {
        if random.next(4) != 0 {
            data.extend_from_slice(message.as_bytes());
        }
    }
    for _ in 0..1 + random.next(6) {
        let at = random.next(data.len() + 1);
        let end = (at + random.next(12)).min(data.len());
        match random.next(5) {
            0 => drop(data.drain(at..end)),
            1 => drop(data.splice(at..at, TOKENS[random.next(TOKENS.len())].bytes())),
            2 => drop(data.splice(at..end, TOKENS[random.next(TOKENS.len())].bytes())),
            3 => {
                let copy = data[at..end].to_vec();
                let to = random.next(data.len() + 1);
                data.splice(to..to, copy);
            }
            _ => {
                if let Some(byte) = data.get_mut(at) {
                    *byte ^= 1 << random.next(8);
                }
            }
        }
    }
    data
}

#[test]
fn mutated_templates_never_panic() {
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let begin = Instant::now();
    let (count, mut rendered) = (100_000, 0);
    for _ in 0..count {
        rendered += usize::from(fuzz_chat(&mutate(&mut random)));
    }
    println!("{count} mutated templates, {rendered} rendered, in {:.0?}", begin.elapsed());
    assert!(rendered > count / 100, "the mutations hardly ever render: {rendered}");
}
