//! What the inspector reads of bodies, whole and in pieces.
//!
//! Takes bodies, gives proof that spans and faults are those of a plain parser. Never looks at the scanner's insides.

use super::*;
use proptest::prelude::*;

const CHAT: &str = r#"{"model": "llama\u002d8b", "messages": [{"role": "system", "content": "Sei höflich. 你好 \"q\" \\ \ud83d\ude00"},
  {"role":"user","content":"Say it in a sentence that is long enough for the wide path: aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa ünd so weiter"}],
  "temperature": -0.7e+2, "n": 2, "str\u0065am" : true , "tools": [{"a":[[], {}, null]}], "rid": "r-1", "x": [0, 10.5E-3, false]}"#;
const IDS: &str = r#"{"input_ids": [1, 22, 333, 4444, 55555, 0, 7, 88, 999, 1010, 11111, 121212, 0, 1, 2, 3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24,25,26,27,28,29,30,31,32,33,34,35], "sampling_params": {"n": 3, "other": {"n": 9}}, "return_logprob": true, "lora_path": "a/b", "model": null}"#;
const BATCH: &str = "{\"prompt\":[ [1,2,3] , [4] ],\"logprobs\":1,\"stream\":null,\"sampling_params\":[{\"n\":1},{\"n\":4}],\"system\":\"s\"}\r\n\t ";
const KEYS: &[&str] = &["prompt", "messages", "text", "input_ids"];
const JSON: routes::Body = routes::Body::Json(KEYS);

/// Reads a body that comes in pieces that end at the given offsets.
fn read_as(
    form: routes::Body,
    content_type: &[u8],
    body: &[u8],
    ends: impl IntoIterator<Item = usize>,
) -> Result<Ask, Fault> {
    let mut inspector = Inspector::new();
    // A body before it, broken off, leaves no trace.
    inspector.begin(JSON, b"");
    let _ = inspector.feed(b"{\"model\":\"old\",\"n\":7,\"prompt\":[\"a\",\"b\"],\"sampling_params\":[{\"n\":");
    inspector.begin(form, content_type);
    for end in ends {
        inspector.feed(&body[..end])?;
    }
    inspector.finish(body)
}

fn read(body: impl AsRef<[u8]>) -> Result<Ask, Fault> {
    read_as(JSON, b"", body.as_ref(), [])
}

/// The answer, which is the same for every cut into two and for single bytes.
fn cut(form: routes::Body, content_type: &[u8], body: &[u8]) -> Result<Ask, Fault> {
    let whole = read_as(form, content_type, body, []);
    for end in 0..=body.len() {
        assert_eq!(read_as(form, content_type, body, [end]), whole, "cut at {end}: {}", body.escape_ascii());
    }
    assert_eq!(read_as(form, content_type, body, 0..=body.len()), whole, "byte by byte: {}", body.escape_ascii());
    whole
}

fn cut_json(body: impl AsRef<[u8]>) -> Result<Ask, Fault> {
    cut(JSON, b"", body.as_ref())
}

fn text(span: Option<Span>, body: &str) -> Option<&str> {
    span.map(|span| std::str::from_utf8(span.of(body.as_bytes())).unwrap())
}

#[test]
fn fields_of_a_chat() {
    let ask = cut_json(CHAT).unwrap();
    assert_eq!(text(ask.model, CHAT), Some(r"llama\u002d8b"));
    assert_eq!(ask.model(CHAT.as_bytes(), &mut Vec::new()), Some(&b"llama-8b"[..]));
    assert!(text(ask.prompt, CHAT).unwrap().starts_with("[{\"role\": \"system\""));
    assert!(text(ask.prompt, CHAT).unwrap().ends_with("weiter\"}]"));
    assert_eq!((ask.prompt_kind, ask.batch, ask.first_prompt), (PromptKind::Chat, 0, None));
    assert_eq!((ask.n, ask.stream, ask.logprobs), (2, true, false));
    assert_eq!(text(ask.rid, CHAT), Some("\"r-1\""));
    assert_eq!(text(ask.tools, CHAT), Some("[{\"a\":[[], {}, null]}]"));
    assert_eq!((ask.adapter, ask.system, ask.instructions, ask.cache_salt), (None, None, None, None));
}

#[test]
fn fields_of_token_ids() {
    let ask = cut_json(IDS).unwrap();
    assert_eq!((ask.prompt_kind, ask.batch, ask.n, ask.logprobs), (PromptKind::Tokens, 0, 3, true));
    assert_eq!((ask.model, text(ask.adapter, IDS)), (None, Some("\"a/b\"")));
    let ask = cut_json(BATCH).unwrap();
    assert_eq!((ask.prompt_kind, ask.batch, ask.n), (PromptKind::TokenBatch, 2, 4));
    assert_eq!((ask.logprobs, ask.stream), (true, false));
    assert_eq!(text(ask.prompt, BATCH), Some("[ [1,2,3] , [4] ]"));
    assert_eq!((text(ask.first_prompt, BATCH), text(ask.system, BATCH)), (Some("[1,2,3]"), Some("\"s\"")));
}

#[test]
fn prompt_shapes() {
    use PromptKind::{Chat, Text, TextBatch, TokenBatch, Tokens};
    const OTHER: PromptKind = PromptKind::None;
    for (value, kind, batch, first) in [
        ("\"a\"", Text, 0, None),
        ("\"\"", Text, 0, None),
        ("[\"a\"]", TextBatch, 1, Some("\"a\"")),
        ("[ \"a,]\" , \"b\", \"c\" ]", TextBatch, 3, Some("\"a,]\"")),
        ("[1]", Tokens, 0, None),
        ("[ -1, 2 ]", Tokens, 0, None),
        ("[[1,2],[3],[]]", TokenBatch, 3, Some("[1,2]")),
        ("[[ ] ]", TokenBatch, 1, Some("[ ]")),
        ("[{}]", Chat, 0, None),
        ("[{\"a\":[1,2]},{},3]", Chat, 0, None),
        ("[]", OTHER, 0, None),
        ("[null]", OTHER, 0, None),
        ("{\"a\":1}", OTHER, 0, None),
        ("7", OTHER, 0, None),
        ("true", OTHER, 0, None),
    ] {
        let body = format!("{{\"x\":[\"a\",1], \"prompt\" :{value}, \"y\":[[]]}}");
        let ask = cut_json(&body).unwrap();
        assert_eq!((ask.prompt_kind, ask.batch), (kind, batch), "{body}");
        assert_eq!((text(ask.prompt, &body), text(ask.first_prompt, &body)), (Some(value), first), "{body}");
    }
}

#[test]
fn the_first_present_key_is_the_prompt_and_the_last_duplicate_counts() {
    for (body, prompt) in [
        (r#"{"messages":[{}],"prompt":"p"}"#, Some("\"p\"")),
        (r#"{"prompt":null,"messages":[{}]}"#, Some("[{}]")),
        (r#"{"prompt":"a","prompt":"b"}"#, Some("\"b\"")),
        (r#"{"prompt":"a","prompt":null,"input_ids":[1]}"#, Some("[1]")),
        (r#"{"prompt":["a","b"],"prompt":[{}]}"#, Some("[{}]")),
        (r#"{"a":{"prompt":"p","model":"m"},"b":[{"model":"m"}]}"#, None),
    ] {
        let ask = cut_json(body).unwrap();
        assert_eq!((text(ask.prompt, body), ask.batch, ask.model), (prompt, 0, None), "{body}");
    }
    let body = r#"{"model":1,"stream":"x","n":0,"model":"a","stream":true,"n":3,"mod\u0065l":"b"}"#;
    let ask = cut_json(body).unwrap();
    assert_eq!((text(ask.model, body), ask.stream, ask.n), (Some("b"), true, 3));
}

#[test]
fn wrong_types_are_told() {
    for (member, told) in [
        (r#""stream":1"#, Some("`stream` must be true or false.")),
        (r#""stream":"true""#, Some("`stream` must be true or false.")),
        (r#""stream":null"#, None),
        (r#""model":["a"]"#, Some("`model` must be a string.")),
        (r#""model":null"#, None),
        (r#""n":0"#, Some("`n` must be a positive integer.")),
        (r#""n":-1"#, Some("`n` must be a positive integer.")),
        (r#""n":1.0"#, Some("`n` must be a positive integer.")),
        (r#""n":true"#, Some("`n` must be a positive integer.")),
        (r#""n":[1]"#, Some("`n` must be a positive integer.")),
        (r#""n":4294967296"#, Some("`n` must be a positive integer.")),
        (r#""n":null"#, None),
        (r#""sampling_params":{"n":"2"}"#, Some("`sampling_params.n` must be a positive integer.")),
        (r#""sampling_params":[{"n":{}},{"n":1}]"#, Some("`sampling_params.n` must be a positive integer.")),
        (r#""sampling_params":{"n":null}"#, None),
        (r#""sampling_params":{"n":0,"n":1}"#, None),
        (r#""sampling_params":{"n":0},"sampling_params":7"#, None),
    ] {
        let fault = told.map(|told| Fault::with(What::BadField, told));
        assert_eq!(cut_json(format!("{{{member}}}")).err(), fault, "{member}");
    }
}

#[test]
fn samples_and_logprobs() {
    for (member, n, logprobs) in [
        (r#""n":5,"sampling_params":{"n":2}"#, 5, false),
        (r#""sampling_params":{"\u006e" : 2 }"#, 2, false),
        (r#""sampling_params":{"a":{"n":7},"b":[{"n":7}]}"#, 1, false),
        (r#""sampling_params":[{"n":3,"a":{"n":7}},{"n":2}]"#, 3, false),
        (r#""sampling_params":{"n":3},"sampling_params":{}"#, 1, false),
        (r#""other":{"n":3}"#, 1, false),
        (r#""logprobs":true"#, 1, true),
        (r#""logprobs":false"#, 1, false),
        (r#""logprobs":0"#, 1, false),
        (r#""logprobs":10"#, 1, true),
        (r#""logprobs":null,"return_logprob":true"#, 1, true),
        (r#""return_logprob":[false,true]"#, 1, true),
        (r#""return_logprob":[false,[true]]"#, 1, false),
        (r#""return_logprob":[true],"return_logprob":[false]"#, 1, false),
    ] {
        let ask = cut_json(format!("{{{member}}}")).unwrap();
        assert_eq!((ask.n, ask.logprobs), (n, logprobs), "{member}");
    }
}

/// Marked members and the bounds of the object, the same for every cut into two and for single bytes.
fn marks(body: &str) -> (Vec<(Marked, &str)>, &str) {
    let read = |ends: &mut dyn Iterator<Item = usize>| {
        let mut inspector = Inspector::new();
        inspector.begin(JSON, b"");
        let _ = inspector.feed(b"{\"n\":1,\"kv_hints\":{\"stream\":[");
        inspector.begin(JSON, b"");
        for end in ends {
            inspector.feed(&body.as_bytes()[..end]).unwrap();
        }
        let ask = inspector.finish(body.as_bytes()).unwrap();
        assert_eq!(ask.private, inspector.marks().iter().any(|mark| mark.field == Marked::Private));
        (inspector.marks().to_vec(), inspector.object())
    };
    let whole = read(&mut std::iter::empty());
    for end in 0..=body.len() {
        assert_eq!(read(&mut [end].into_iter()), whole, "cut at {end}: {body}");
    }
    assert_eq!(read(&mut (0..=body.len())), whole, "byte by byte: {body}");
    let (marks, object) = whole;
    let shown = marks.into_iter().map(|mark| (mark.field, text(Some(mark.span), body).unwrap())).collect();
    (shown, text(Some(object), body).unwrap())
}

#[test]
fn members_that_some_leg_must_not_carry() {
    use Marked::*;
    for (body, want) in [
        ("{}", &[][..]),
        (r#"{"model":"n","prompt":"stream","sampling_params":{"n":1,"bootstrap_room":7},"x":[{"stream":1}]}"#, &[]),
        (
            r#"{"bootstrap_host":"a","bootstrap_port" : null ,"bootstrap_room":[1,{"kv_hints":2}],"bootstrap_pair_key":0}"#,
            &[
                (Private, r#""bootstrap_host":"a""#),
                (Private, r#""bootstrap_port" : null"#),
                (Private, r#""bootstrap_room":[1,{"kv_hints":2}]"#),
                (Private, r#""bootstrap_pair_key":0"#),
            ],
        ),
        (
            r#"{"routed_dp_rank":1,"disagg_prefill_dp_rank":1,"data_parallel_rank":1,"kv_transfer_params":{},"kv_hints":-1.5e3}"#,
            &[
                (Private, r#""routed_dp_rank":1"#),
                (Private, r#""disagg_prefill_dp_rank":1"#),
                (Private, r#""data_parallel_rank":1"#),
                (Private, r#""kv_transfer_params":{}"#),
                (Private, r#""kv_hints":-1.5e3"#),
            ],
        ),
        (
            r#"{"stream":true,"max_tokens":1,"max_completion_tokens":"a","max_output_tokens":2,"stream_options":{"n":1}}"#,
            &[
                (Stream, r#""stream":true"#),
                (MaxTokens, r#""max_tokens":1"#),
                (MaxCompletionTokens, r#""max_completion_tokens":"a""#),
                (MaxOutputTokens, r#""max_output_tokens":2"#),
                (StreamOptions, r#""stream_options":{"n":1}"#),
            ],
        ),
        (
            "\t{\"min_tokens\"\n:\n1\n,\"min_completion_tokens\":1,\"n\":1,\"\\u006e\":2,\"n\" :3 } \n",
            &[
                (MinTokens, "\"min_tokens\"\n:\n1"),
                (MinCompletionTokens, "\"min_completion_tokens\":1"),
                (N, "\"n\":1"),
                (N, "\"\\u006e\":2"),
                (N, "\"n\" :3"),
            ],
        ),
        (r#"{"Stream":1,"stream ":1,"bootstrap":1,"kv_hint":1,"nn":1,"xbootstrap_room":1}"#, &[]),
        (r#"{"b\u006fotstrap_room":1}"#, &[(Private, r#""b\u006fotstrap_room":1"#)]),
    ] {
        assert_eq!(marks(body), (want.to_vec(), body.trim()), "{body}");
    }
}

#[test]
fn marked_members_have_a_bound() {
    let body = |count: usize, end: &str| format!("{{{}{end}", vec!["\"kv_hints\":1"; count].join(","));
    assert_eq!(marks(&body(crate::limits::MAX_MARKS, "}")).0.len(), crate::limits::MAX_MARKS);
    let one_more = |end| cut_json(body(crate::limits::MAX_MARKS + 1, end)).unwrap_err().what;
    assert_eq!((one_more("}"), one_more("")), (What::BadField, What::BadJson));
}

#[test]
fn bodies_that_are_no_json_have_no_marks() {
    let mut inspector = Inspector::new();
    for form in [routes::Body::Opaque, routes::Body::None, routes::Body::Multipart] {
        inspector.begin(JSON, b"");
        assert!(inspector.finish(b"{\"kv_hints\":1}").unwrap().private);
        inspector.begin(form, b"multipart/form-data; boundary=xYz");
        assert!(!inspector.finish(FORM.as_bytes()).unwrap().private);
        assert_eq!((inspector.marks(), inspector.object()), (&[][..], Span::default()));
    }
}

#[test]
fn adapters() {
    for (body, adapter) in [
        (r#"{"lora_name":"a"}"#, Some("\"a\"")),
        (r#"{"lora_name":"a","lora_path":["b",null]}"#, Some("[\"b\",null]")),
        (r#"{"lora_path":null,"lora_name":"a"}"#, Some("\"a\"")),
        (r#"{"lora":"a"}"#, None),
    ] {
        assert_eq!(text(cut_json(body).unwrap().adapter, body), adapter);
    }
}

#[test]
fn names_are_unescaped() {
    for (raw, name) in [
        (r#"a\"\\\/\b\f\n\r\t"#, "a\"\\/\u{8}\u{c}\n\r\t"),
        (r"\u00e9\u4f60\uD83D\uDE00z", "é你😀z"),
        (r"\ud83d", "\u{fffd}"),
        (r"\ud83d\u0041", "\u{fffd}A"),
        (r"\ude00\ud83d", "\u{fffd}\u{fffd}"),
    ] {
        let body = format!("{{\"model\":\"{raw}\"}}");
        let mut scratch = b"old".to_vec();
        let ask = read(&body).unwrap();
        assert_eq!(ask.model(body.as_bytes(), &mut scratch), Some(name.as_bytes()), "{raw}");
    }
    // An escaped key longer than any that is looked for.
    assert_eq!(read(format!(r#"{{"\u006d{}":1}}"#, "x".repeat(99))), Ok(Ask::default()));
}

#[test]
fn malformed_json_is_refused_with_the_offset() {
    let deep = |levels: usize| format!("{{\"a\":{}{}}}", "[".repeat(levels), "]".repeat(levels));
    let too_deep = deep(crate::limits::MAX_JSON_DEPTH);
    assert!(cut_json(deep(crate::limits::MAX_JSON_DEPTH - 1)).is_ok());
    for (body, told) in [
        (&b""[..], "The body is empty."),
        (b" \n", "At byte 2, the end of the body: expected an object."),
        (b"[]", "At byte 0: expected an object."),
        (b"\xEF\xBB\xBF{}", "At byte 0: expected an object."),
        (b"{", "At byte 1, the end of the body: expected a key in quotes or `}`."),
        (b"{,", "At byte 1: expected a key in quotes or `}`."),
        (b"{\"a\":1,}", "At byte 7: expected a key in quotes."),
        (b"{\"a\" 1}", "At byte 5: expected `:` after the key."),
        (b"{\"a\":}", "At byte 5: expected a value."),
        (b"{\"a\":[1,]}", "At byte 8: expected a value."),
        (b"{\"a\":[,]}", "At byte 6: expected a value or `]`."),
        (b"{\"a\":[1}}", "At byte 7: expected `,` or `]`."),
        (b"{\"a\":1]", "At byte 6: expected `,` or `}`."),
        (b"{\"a\":1 2}", "At byte 7: expected `,` or `}`."),
        (b"{} x", "At byte 3: expected nothing after the object."),
        (b"{}{}", "At byte 2: expected nothing after the object."),
        (b"{\"a\":NaN}", "At byte 5: expected a value."),
        (b"{\"a\":Infinity}", "At byte 5: expected a value."),
        (b"{\"a\":-Infinity}", "At byte 6: expected a digit."),
        (b"{\"a\":nil}", "At byte 6: expected `true`, `false` or `null`."),
        (b"{\"a\":tru", "At byte 8, the end of the body: expected `true`, `false` or `null`."),
        (b"{\"a\":truee}", "At byte 9: expected `,` or `}`."),
        (b"{\"a\":01}", "At byte 6: expected `,` or `}`."),
        (b"{\"a\":1.}", "At byte 7: expected a digit."),
        (b"{\"a\":.5}", "At byte 5: expected a value."),
        (b"{\"a\":+5}", "At byte 5: expected a value."),
        (b"{\"a\":1e}", "At byte 7: expected a digit or a sign."),
        (b"{\"a\":1e+}", "At byte 8: expected a digit."),
        (b"{\"a\":12", "At byte 7, the end of the body: expected `,` or `}`."),
        (b"{\"a\":\"\x1F\"}", "At byte 6: expected no control character in a string."),
        (b"{\"a\n\":1}", "At byte 3: expected no control character in a string."),
        (b"{\"a\":\"\\x\"}", "At byte 7: expected one of `\"\\/bfnrtu` after the backslash."),
        (b"{\"a\":\"\\u00g0\"}", "At byte 10: expected four hexadecimal digits after `\\u`."),
        (b"{\"a\":\"b", "At byte 7, the end of the body: expected the string's closing quote."),
        (b"{\"a\":\"\xFF\"}", "At byte 6: expected UTF-8."),
        (b"{\"a\":\"\xE4\xBD\"}", "At byte 6: expected UTF-8."),
        (b"{\"a\":\"\xC0\x80\"}", "At byte 6: expected UTF-8."),
        (b"{\"a\":\"\xED\xA0\x80\"}", "At byte 6: expected UTF-8."),
        (b"{\"a\":\"\xF4\x90\x80\x80\"}", "At byte 6: expected UTF-8."),
        (b"{\"a\":\"ok\xE4\x01\"}", "At byte 8: expected UTF-8."),
        (b"{\"a\":\"ok\xE4\\x\"}", "At byte 8: expected UTF-8."),
        (b"{\"a\":\"\xF0\x80", "At byte 8, the end of the body: expected the string's closing quote."),
        (b"{\"a\xFF\":1}", "At byte 3: expected UTF-8."),
        (b"{\"a\":\xC2\xA01}", "At byte 5: expected a value."),
        (b"{\"a\":1}\x00", "At byte 7: expected nothing after the object."),
        (too_deep.as_bytes(), "At byte 516: expected at most 512 levels of nesting."),
    ] {
        assert_eq!(cut_json(body), Err(Fault::with(What::BadJson, told)), "{}", body.escape_ascii());
    }
}

#[test]
fn bad_json_goes_before_wrong_types() {
    assert_eq!(cut_json("{\"n\":0").unwrap_err().what, What::BadJson);
}

#[test]
fn unread_bodies_ask_nothing() {
    for form in [routes::Body::None, routes::Body::Opaque] {
        assert_eq!(cut(form, b"", b"\x00{]"), Ok(Ask::default()));
        assert_eq!(cut(form, b"", b""), Ok(Ask::default()));
    }
}

const FORM: &str = "--xYz\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a;b\\\".wav\"\r\nContent-Type: audio/wav\r\n\r\n\
    RIFF\r\n--xY\r\n--xYzzz\r\n\r\n--xYz-\r\n\r\n--xYz\r\ncontent-disposition:form-data;name=model\r\n\r\nwhisper-1\r\n--xYz \t\r\n\
    Content-Disposition: form-data; name=\"stream\"\r\n\r\nTrue\r\n--xYz--\r\nepilogue";

#[test]
fn forms() {
    let types =
        [&b"multipart/form-data; boundary=xYz"[..], b"Multipart/Form-Data; charset=utf-8; Boundary=\"xYz\" ; a=b"];
    for content_type in types {
        for before in ["", "preamble --xYz\r\n", "--xYzz\r\n"] {
            let body = format!("{before}{FORM}");
            let ask = cut(routes::Body::Multipart, content_type, body.as_bytes()).unwrap();
            assert_eq!((text(ask.model, &body), ask.stream), (Some("whisper-1"), true));
            assert_eq!((ask.n, ask.prompt, ask.model_escaped), (1, None, false));
        }
    }
}

#[test]
fn parts_that_are_no_fields_and_duplicates() {
    let part = |head: &str, text: &str| format!("--b\r\nContent-Disposition: form-data; {head}\r\n\r\n{text}\r\n");
    for (parts, model, stream) in [
        (part("name=model", ""), Some(""), false),
        (part("name=model", "a") + &part("name=model", "b"), Some("b"), false),
        (part("filename=x; name=model", "a"), None, false),
        (part("name=other", "model"), None, false),
        (part("name=stream", "0") + &part("name=model", "\r\n"), Some("\r\n"), false),
        (part("name=stream", "yes"), None, true),
    ] {
        let body = parts + "--b--";
        let ask = cut(routes::Body::Multipart, b"multipart/form-data;boundary=b", body.as_bytes()).unwrap();
        assert_eq!((text(ask.model, &body), ask.stream), (model, stream), "{body}");
    }
}

#[test]
fn malformed_forms_are_refused() {
    let long = format!("--b\r\nX: {}\r\n\r\n", "x".repeat(17_000));
    let unending = format!("--b\r\nX: {}", "x".repeat(17_000));
    let form = |content_type: &str, body: &str| {
        read_as(routes::Body::Multipart, content_type.as_bytes(), body.as_bytes(), []).unwrap_err()
    };
    for content_type in [
        "",
        "multipart/form-data",
        "multipart/form-data; boundary=",
        "multipart/mixed; boundary=b",
        "multipart/form-data; boundary=\"",
        "multipart/form-data; xboundary=b",
    ] {
        assert_eq!(form(content_type, FORM), Fault::with(What::BadMultipart, "The Content-Type must name a boundary."));
    }
    assert_eq!(form(&format!("multipart/form-data; boundary={}", "b".repeat(71)), FORM).what, What::BadMultipart);
    for (body, at) in [
        ("", "At byte 0: expected the boundary that ends the form."),
        ("--b\r\n", "At byte 5: expected the boundary that ends the form."),
        ("no boundary at all", "At byte 18: expected the boundary that ends the form."),
        (
            "--b\r\nContent-Disposition: form-data; name=model\r\n\r\nx",
            "At byte 52: expected the boundary that ends the form.",
        ),
        ("--b\r\n\r\nx\r\n--b--", "At byte 3: expected a Content-Disposition with the part's name."),
        (
            "--b\r\nContent-Disposition: form-data\r\n\r\nx\r\n--b--",
            "At byte 3: expected a Content-Disposition with the part's name.",
        ),
        (&long, "At byte 3: expected shorter header fields of the part."),
        (&unending, "At byte 3: expected shorter header fields of the part."),
    ] {
        let told = Fault::with(What::BadMultipart, at);
        assert_eq!(form("multipart/form-data; boundary=b", body), told);
        if body.len() < 1000 {
            assert_eq!(cut(routes::Body::Multipart, b"multipart/form-data; boundary=b", body.as_bytes()), Err(told));
        }
    }
    let body = "--b\r\nContent-Disposition: form-data; name=stream\r\n\r\nmaybe\r\n--b--";
    assert_eq!(
        form("multipart/form-data; boundary=b", body),
        Fault::with(What::BadField, "`stream` must be true or false.")
    );
}

const FORM_PARTS: [&[u8]; 13] = [
    b"\r\n--b",
    b"--b",
    b"--",
    b"\r\n",
    b"\r\n\r\n",
    b"\r",
    b"\n",
    b" ",
    b"Content-Disposition: form-data; name=\"model\"",
    b"Content-Disposition: form-data; name=stream; filename=\"\\",
    b"x",
    b"true",
    b"\xFF;=\"\\",
];

/// Whether the reference takes the body: its lazy reading checks neither UTF-8 nor the depth.
fn reference(body: &[u8]) -> bool {
    let object = body.iter().find(|byte| !byte.is_ascii_whitespace()) == Some(&b'{');
    object && std::str::from_utf8(body).is_ok() && serde_json::from_slice::<serde::de::IgnoredAny>(body).is_ok()
}

/// JSON values, and the syntax of which near-JSON is made.
fn value() -> impl Strategy<Value = String> {
    let leaf = prop_oneof![
        "-?(0|[1-9][0-9]{0,5})(\\.[0-9]{1,3})?([eE][+-]?[0-9]{1,2})?",
        "true|false|null",
        "\"([a-z ü你]{0,40}(\\\\[\"\\\\/bfnrt]|\\\\u[0-9a-fA-F]{4})?){0,4}\"",
        proptest::collection::vec("[0-9]|[1-9][0-9]{1,5}", 0..60).prop_map(|ids| format!("[{}]", ids.join(","))),
        proptest::collection::vec("[0-9]|[1-9][0-9]{1,5}", 0..60).prop_map(|ids| format!("[{}]", ids.join(", "))),
    ];
    leaf.prop_recursive(4, 40, 6, |inner| {
        prop_oneof![
            proptest::collection::vec(inner.clone(), 0..6).prop_map(|items| format!("[ {}\n]", items.join(" , "))),
            proptest::collection::vec(("[a-z]{0,9}", inner), 0..6).prop_map(object),
        ]
    })
}

fn object(members: Vec<(String, String)>) -> String {
    let members: Vec<_> = members.iter().map(|(key, value)| format!("\"{key}\": {value}")).collect();
    format!("{{{}}}", members.join(","))
}

fn body() -> impl Strategy<Value = Vec<u8>> {
    let key = prop_oneof!["[a-z]{1,4}", Just("prompt".into()), Just("rid".into()), Just("sampling_params".into())];
    proptest::collection::vec((key, value()), 0..5).prop_map(|members| object(members).into_bytes())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn valid_json_is_taken(body in body()) {
        prop_assert!(reference(&body));
        let read = read(&body);
        prop_assert!(!matches!(read, Err(Fault { what: What::BadJson, .. })), "{:?}", read);
    }

    #[test]
    fn mutated_json_is_taken_if_the_reference_takes_it(
        body in body(),
        changes in proptest::collection::vec((any::<prop::sample::Index>(), 0..3u8, prop_oneof![
            any::<u8>(),
            prop::sample::select(&b"\"\\,:[]{}0123456789.eE+-tfn u\x80\xC3\xE4\xF0"[..]),
        ]), 1..4),
        ends in proptest::collection::vec(any::<prop::sample::Index>(), 0..6),
    ) {
        let mut body = body;
        for (at, how, byte) in changes {
            let at = at.index(body.len() + 1);
            match how {
                0 => body.insert(at, byte),
                1 if at < body.len() => body[at] = byte,
                _ if at < body.len() => { body.remove(at); }
                _ => {}
            }
        }
        let whole = read(&body);
        let taken = !matches!(whole, Err(Fault { what: What::BadJson, .. }));
        prop_assert_eq!(taken, reference(&body), "{}: {:?}", body.escape_ascii(), whole);
        let mut ends: Vec<_> = ends.iter().map(|end| end.index(body.len() + 1)).collect();
        ends.sort_unstable();
        prop_assert_eq!(read_as(JSON, b"", &body, ends), whole.clone());
        prop_assert_eq!(read_as(JSON, b"", &body, 0..=body.len()), whole);
    }

    #[test]
    fn random_bytes_never_panic(
        start in prop::sample::select(&["", "{\"", "{\"a\":\"", "{\"a\":[1,", "{\"model\":"][..]),
        noise in proptest::collection::vec(any::<u8>(), 0..200),
        end in any::<prop::sample::Index>(),
    ) {
        let body = [start.as_bytes(), &noise].concat();
        let whole = read(&body);
        prop_assert_eq!(read_as(JSON, b"", &body, [end.index(body.len() + 1)]), whole);
    }

    #[test]
    fn random_forms_never_panic(
        parts in proptest::collection::vec(prop::sample::select(&FORM_PARTS[..]), 0..30),
        ends in proptest::collection::vec(any::<prop::sample::Index>(), 0..6),
    ) {
        let body = parts.concat();
        let content_type = b"multipart/form-data; boundary=b";
        let whole = read_as(routes::Body::Multipart, content_type, &body, []);
        let mut ends: Vec<_> = ends.iter().map(|end| end.index(body.len() + 1)).collect();
        ends.sort_unstable();
        prop_assert_eq!(read_as(routes::Body::Multipart, content_type, &body, ends), whole.clone());
        prop_assert_eq!(read_as(routes::Body::Multipart, content_type, &body, 0..=body.len()), whole);
    }

    #[test]
    fn random_content_types_never_panic(content_type in proptest::collection::vec(any::<u8>(), 0..40)) {
        let content_type = [b"multipart/form-data", &content_type[..]].concat();
        let _ = read_as(routes::Body::Multipart, &content_type, FORM.as_bytes(), []);
    }
}
