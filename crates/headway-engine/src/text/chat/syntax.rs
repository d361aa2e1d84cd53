//! Tags that transformers adds to Jinja. `{% generation %}` marks assistant text for training masks and changes nothing
//! in the output, so it becomes a plain scope. Not a parser: it only needs to know what is a tag and what is not.

/// The template with `generation` tags turned into `with` tags; text, comments, strings and raw blocks stay as they are.
pub(super) fn without_generation_tags(source: &str) -> String {
    if !source.contains("generation") {
        return source.to_string();
    }
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(at) = rest.find('{') {
        let (before, tag) = rest.split_at(at);
        out.push_str(before);
        let (copied, len) = match tag.as_bytes().get(1) {
            Some(b'#') => (None, tag.find("#}").map_or(tag.len(), |i| i + 2)),
            Some(b'{') => (None, tag_len(tag, "}}")),
            Some(b'%') => block(tag),
            _ => (None, 1),
        };
        out.push_str(copied.as_deref().unwrap_or(&tag[..len]));
        rest = &tag[len..];
    }
    out.push_str(rest);
    out
}

/// A block tag: what to write in its place, if not itself, and how long it is; a raw block is taken whole.
fn block(tag: &str) -> (Option<String>, usize) {
    let len = tag_len(tag, "%}");
    let word_at = 2 + tag[2..].find(|c: char| !matches!(c, '-' | '+') && !c.is_whitespace()).unwrap_or(0);
    let word: &str =
        tag[word_at..].split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap_or_default();
    let new = match word {
        "generation" => "with",
        "endgeneration" => "endwith",
        "raw" => return (None, end_of_raw(tag, len)),
        _ => return (None, len),
    };
    let after = &tag[word_at + word.len()..len.max(word_at + word.len())];
    (Some(format!("{}{new}{after}", &tag[..word_at])), len.max(word_at + word.len()))
}

/// Length up to and with the closing mark, which does not count inside a string.
fn tag_len(tag: &str, close: &str) -> usize {
    let bytes = tag.as_bytes();
    let mut quote = None;
    let mut i = 2;
    while i < bytes.len() {
        match (quote, bytes[i]) {
            (Some(_), b'\\') => i += 1,
            (Some(q), c) if q == c => quote = None,
            (None, c @ (b'"' | b'\'')) => quote = Some(c),
            (None, _) if bytes[i..].starts_with(close.as_bytes()) => return i + close.len(),
            _ => {}
        }
        i += 1;
    }
    tag.len()
}

fn end_of_raw(tag: &str, from: usize) -> usize {
    let mut at = from;
    while let Some(next) = tag[at..].find("{%").map(|i| i + at) {
        let inner = tag[next + 2..].trim_start_matches(['-', '+']).trim_start();
        if inner.starts_with("endraw") {
            return next + tag_len(&tag[next..], "%}");
        }
        at = next + 2;
    }
    tag.len()
}

#[cfg(test)]
mod tests {
    use super::without_generation_tags as clean;

    #[test]
    fn tags_become_scopes_and_keep_their_whitespace_control() {
        assert_eq!(clean("a{%- generation -%}b{% endgeneration %}c"), "a{%- with -%}b{% endwith %}c");
        assert_eq!(clean("{%generation%}b{%endgeneration%}"), "{%with%}b{%endwith%}");
    }

    #[test]
    fn what_is_no_tag_stays() {
        for same in [
            "{{ '{% generation %}' }}",
            "{# {% generation %} #}",
            "{% raw %}{% generation %}{% endraw %}",
            "{% if add_generation_prompt %}x{% endif %}",
            "{% set x = '%}{% generation %}' %}",
            "generation { } {",
            "{% generation",
            "{%",
            "{{ 'generation",
        ] {
            let out = clean(same);
            if same == "{% generation" {
                assert_eq!(out, "{% with");
            } else {
                assert_eq!(out, same);
            }
        }
    }
}
