//! Properties of streaming: what is streamed is what is decoded whole, and nothing at or after a stop string is shown.

use headway_engine::text::{GgufTokenizer, StopMatcher, StreamDecoder, TextError, Tokenizer};
use proptest::prelude::*;
use std::path::Path;
use std::sync::OnceLock;

fn tiny(name: &str) -> Tokenizer {
    Tokenizer::from_dir(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)).unwrap()
}

fn tokenizers() -> &'static [Tokenizer; 2] {
    static ONCE: OnceLock<[Tokenizer; 2]> = OnceLock::new();
    ONCE.get_or_init(|| [tiny("tiny-llama"), tiny("tiny-mistral")])
}

fn stream(mut decoder: StreamDecoder, ids: &[u32]) -> String {
    let mut text = String::new();
    for id in ids {
        text.push_str(&decoder.push(*id));
        assert!(decoder.pending_bytes() <= 3);
    }
    text.push_str(&decoder.finish());
    text
}

/// The stop strings' meaning, character by character: the shown text and whether it stopped.
fn stop_reference(text: &str, stops: &[String]) -> (String, bool) {
    for end in (0..=text.len()).filter(|i| text.is_char_boundary(*i)) {
        let ended = stops.iter().filter(|s| text[..end].ends_with(s.as_str())).map(String::len).max();
        if let Some(len) = ended {
            return (text[..end - len].to_string(), true);
        }
    }
    (text.to_string(), false)
}

fn stop_stream(pieces: &[String], stops: &[String]) -> (String, bool) {
    let mut matcher = StopMatcher::new(stops).unwrap();
    let mut shown: String = pieces.iter().map(|p| matcher.push(p)).collect();
    shown.push_str(&matcher.finish());
    (shown, matcher.matched().is_some())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn streamed_ids_are_the_whole_text(ids in prop::collection::vec(0u32..520, 0..40), skip: bool) {
        for tokenizer in tokenizers() {
            let whole = tokenizer.decode(&ids, skip);
            prop_assert_eq!(&stream(StreamDecoder::new(tokenizer.clone(), skip), &ids), &whole);
            let going_on = tokenizer.decode_continuation(&ids, skip);
            prop_assert_eq!(&stream(StreamDecoder::continuing(tokenizer.clone(), skip), &ids), &going_on);
            let with_space = format!(" {whole}");
            prop_assert!(going_on == whole || going_on == with_space);
        }
    }

    /// Against the decoding of the `tokenizers` crate. Byte-fallback runs that hold both whole characters and stray
    /// bytes are left out: there the crate replaces the whole characters too.
    #[test]
    fn whole_texts_are_those_of_the_crate(ids in prop::collection::vec(0u32..512, 0..40), skip: bool) {
        let [bytes, fallback] = tokenizers();
        prop_assert_eq!(bytes.decode(&ids, skip), bytes.decode_reference(&ids, skip).unwrap());
        let reference = fallback.decode_reference(&ids, skip).unwrap();
        if !reference.contains('\u{fffd}') {
            prop_assert_eq!(fallback.decode(&ids, skip), reference);
        }
    }

    #[test]
    fn any_text_survives_and_streams(text in "\\PC{0,24}") {
        for tokenizer in tokenizers() {
            let ids = tokenizer.encode(&text, false).unwrap();
            let whole = tokenizer.decode(&ids, false);
            prop_assert_eq!(&whole, &text);
            prop_assert_eq!(&stream(StreamDecoder::new(tokenizer.clone(), false), &ids), &whole);
        }
    }

    #[test]
    fn stops_do_not_depend_on_the_pieces(
        pieces in prop::collection::vec("[abé ]{0,4}", 0..12),
        stops in prop::collection::vec("[abé ]{1,4}", 0..4),
    ) {
        let text: String = pieces.concat();
        let expected = stop_reference(&text, &stops);
        prop_assert_eq!(&stop_stream(&pieces, &stops), &expected);
        let letters: Vec<String> = text.chars().map(String::from).collect();
        prop_assert_eq!(&stop_stream(&letters, &stops), &expected);
    }
}

#[test]
fn an_emoji_over_four_tokens_is_held_until_it_is_whole() {
    for tokenizer in tokenizers() {
        let ids = tokenizer.encode("😀", false).unwrap();
        let tail = &ids[ids.len() - 4..];
        let mut decoder = StreamDecoder::new(tokenizer.clone(), true);
        let pieces: Vec<String> = tail.iter().map(|id| decoder.push(*id)).collect();
        assert_eq!(pieces, ["", "", "", "😀"]);
        // cut in the middle: replacement marks at the end, and no lost text
        let mut cut = StreamDecoder::new(tokenizer.clone(), true);
        assert!(tail[..2].iter().all(|id| cut.push(*id).is_empty()));
        assert!(cut.finish().chars().all(|c| c == '\u{fffd}'));
    }
}

/// A small byte-level vocabulary: 256 bytes, one merge, a marker.
fn gguf() -> GgufTokenizer {
    let shown = |b: u8| match b {
        0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff => char::from(b),
        0..=0x20 => char::from_u32(0x100 + u32::from(b)).unwrap(),
        0x7f..=0xa0 => char::from_u32(0x121 + u32::from(b) - 0x7f).unwrap(),
        0xad => '\u{143}',
    };
    let mut tokens: Vec<String> = (0..=255u8).map(|b| shown(b).to_string()).collect();
    tokens.extend(["he", "<|im_end|>", "<|begin|>"].map(String::from));
    let mut types = vec![1; 259];
    types[257] = 3;
    GgufTokenizer {
        model: "gpt2".into(),
        pre: Some("gpt-2".into()),
        tokens,
        token_types: Some(types),
        merges: Some(vec!["h e".into()]),
        bos_id: Some(258),
        eos_id: Some(257),
        ..GgufTokenizer::default()
    }
}

/// A small SentencePiece vocabulary with scores only.
fn sentencepiece() -> GgufTokenizer {
    let mut tokens: Vec<String> = ["<unk>", "<s>", "</s>"].map(String::from).to_vec();
    tokens.extend((0..=255u8).map(|b| format!("<0x{b:02X}>")));
    tokens.extend(["▁", "a", "b", "ab", "bb", "▁a", "abb"].map(String::from));
    let n = tokens.len();
    let mut types = vec![1; n];
    (types[0], types[1], types[2]) = (2, 3, 3);
    types[3..259].fill(6);
    let mut scores = vec![0.0; n];
    scores[259..].copy_from_slice(&[-9.0, -9.0, -9.0, -4.0, -3.0, -5.0, -6.0]);
    GgufTokenizer {
        model: "llama".into(),
        tokens,
        token_types: Some(types),
        scores: Some(scores),
        bos_id: Some(1),
        eos_id: Some(2),
        unk_id: Some(0),
        ..GgufTokenizer::default()
    }
}

#[test]
fn bos_is_added_exactly_as_the_metadata_says() {
    // (kind's custom, add_bos_token) -> added
    for (add, byte_level, sentence) in
        [(None, false, true), (Some(true), true, true), (Some(false), false, false)]
    {
        let t = Tokenizer::from_gguf(GgufTokenizer { add_bos: add, ..gguf() }).unwrap();
        assert_eq!(t.adds_bos(), byte_level);
        assert_eq!(t.encode("he", true).unwrap().first() == Some(&258), byte_level);
        assert_eq!(t.encode("<|begin|>he", true).unwrap(), [258, 256], "no second BOS");
        assert_eq!(t.encode("he", false).unwrap(), [256]);
        let t = Tokenizer::from_gguf(GgufTokenizer { add_bos: add, ..sentencepiece() }).unwrap();
        assert_eq!(t.adds_bos(), sentence);
    }
    let error =
        Tokenizer::from_gguf(GgufTokenizer { add_bos: Some(true), bos_id: None, ..gguf() }).unwrap_err();
    assert!(error.to_string().contains("add_bos_token"), "{error}");
}

#[test]
fn markers_are_one_id_each_and_end_the_generation() {
    let t = Tokenizer::from_gguf(gguf()).unwrap();
    assert_eq!(t.encode("he<|im_end|><|im_end|>he", false).unwrap(), [256, 257, 257, 256]);
    assert_eq!(t.eos_ids(), [257]);
    assert!(t.is_special(257) && t.is_special(258) && !t.is_special(256) && !t.is_special(9999));
    assert_eq!(t.decode(&[256, 257, 256], true), "hehe");
    assert_eq!(t.decode(&[256, 257], false), "he<|im_end|>");
    assert_eq!((t.vocab_size(), t.id_to_token(256).as_deref(), t.id_to_token(259)), (259, Some("he"), None));
    assert!(Tokenizer::check_ids(&[0, 258], 259).is_ok());
    assert_eq!(Tokenizer::check_ids(&[259], 259), Err(TextError::TokenId { id: 259, vocab_size: 259 }));
}

#[test]
fn scores_decide_the_merges_and_bytes_never_vanish() {
    let t = Tokenizer::from_gguf(sentencepiece()).unwrap();
    let shown = |text: &str| -> Vec<String> {
        let ids = t.encode(text, false).unwrap();
        ids.into_iter().map(|id| t.id_to_token(id).unwrap()).collect()
    };
    assert_eq!(shown("abb"), ["▁a", "bb"]);
    assert_eq!(shown("aab"), ["▁a", "ab"]);
    for text in ["\n\u{7}龘😀 a", "  a b ", "<s>"] {
        assert_eq!(t.decode(&t.encode(text, false).unwrap(), false), text);
    }
    // merges only, and both
    let merges = Some(["a b", "b b", "▁ a", "a bb"].map(String::from).to_vec());
    for scores in [None, sentencepiece().scores] {
        let t = Tokenizer::from_gguf(GgufTokenizer { merges: merges.clone(), scores, ..sentencepiece() })
            .unwrap();
        let ids = t.encode("abb", false).unwrap();
        assert_eq!(ids.iter().map(|id| t.id_to_token(*id).unwrap()).collect::<Vec<_>>(), ["▁", "ab", "b"]);
    }
}

#[test]
fn contradictions_in_the_metadata_name_their_key() {
    let cases: [(&str, GgufTokenizer); 14] = [
        ("tokenizer.ggml.tokens", GgufTokenizer { tokens: vec![], ..gguf() }),
        ("tokenizer.ggml.scores", GgufTokenizer { scores: Some(vec![0.0; 3]), ..gguf() }),
        ("tokenizer.ggml.token_type", GgufTokenizer { token_types: Some(vec![1; 3]), ..gguf() }),
        ("tokenizer.ggml.token_type", GgufTokenizer { token_types: Some(vec![77; 259]), ..gguf() }),
        ("tokenizer.ggml.bos_token_id", GgufTokenizer { bos_id: Some(259), ..gguf() }),
        ("tokenizer.ggml.eos_token_id", GgufTokenizer { eos_id: Some(u32::MAX), ..gguf() }),
        ("tokenizer.ggml.merges", GgufTokenizer { merges: None, ..gguf() }),
        ("tokenizer.ggml.merges", GgufTokenizer { merges: Some(vec!["he".into()]), ..gguf() }),
        ("tokenizer.ggml.merges", GgufTokenizer { merges: Some(vec!["h zz".into()]), ..gguf() }),
        ("tokenizer.ggml.merges", GgufTokenizer { merges: Some(vec![" ".into(), String::new()]), ..gguf() }),
        ("tokenizer.ggml.pre", GgufTokenizer { pre: Some("nobody".into()), ..gguf() }),
        ("tokenizer.ggml.model", GgufTokenizer { model: "bert".into(), ..gguf() }),
        ("tokenizer.ggml.scores", GgufTokenizer { scores: None, ..sentencepiece() }),
        ("tokenizer.ggml.scores", GgufTokenizer { scores: Some(vec![f32::NAN; 266]), ..sentencepiece() }),
    ];
    for (key, gguf) in cases {
        let error = Tokenizer::from_gguf(gguf).unwrap_err().to_string();
        assert!(error.contains(key) && error.lines().count() == 1, "{key}: {error}");
    }
    let mut twice = gguf();
    twice.tokens[3] = "A".into();
    let error = Tokenizer::from_gguf(twice).unwrap_err().to_string();
    assert!(error.contains("twice") && error.contains("tokenizer.ggml.tokens"), "{error}");
}

#[test]
fn a_vocabulary_without_a_byte_refuses_that_character() {
    let mut small = gguf();
    small.tokens[0x21] = "unused".into(); // '!'
    let t = Tokenizer::from_gguf(small).unwrap();
    assert_eq!(t.encode("he", false).unwrap(), [256]);
    let error = t.encode("he!", false).unwrap_err().to_string();
    assert!(error.contains("'!'") && error.contains("U+0021"), "{error}");
}

/// Cut and altered `tokenizer.json` files: an error or a tokenizer, never a panic that gets out.
#[test]
fn broken_tokenizer_files_are_refused() {
    let good =
        std::fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tiny-mistral/tokenizer.json"))
            .unwrap();
    for cut in (0..good.len()).step_by(997) {
        assert!(Tokenizer::from_json(&good[..cut], None, None, None).is_err(), "cut at {cut}");
    }
    let text = String::from_utf8(good).unwrap();
    for (from, to) in [
        ("\"<unk>\"", "\"<gone>\""),
        ("\"BPE\"", "\"Unigram\""),
        ("\"Strip\"", "\"CTC\""),
        ("\"th\"", "\"gone\""),
        ("\"vocab\"", "\"no\""),
        ("\"id\": 2", "\"id\": 4294967295"),
        ("\"type_id\": 0", "\"type_id\": -1"),
        ("\"<s>\"", "\"\""),
    ] {
        let altered = text.replace(from, to);
        let result = Tokenizer::from_json(altered.as_bytes(), None, None, None);
        if let Err(error) = result {
            assert!(error.to_string().contains("tokenizer.json"), "{from}: {error}");
        }
    }
    let absent = Tokenizer::from_dir(Path::new("no/such/model")).unwrap_err();
    assert!(absent.to_string().contains("tokenizer.json"), "{absent}");
}
