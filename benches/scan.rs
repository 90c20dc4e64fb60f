//! Body inspection against sonic-rs: `cargo bench --bench scan`.
//!
//! Both read the same bodies and note the same top-level members; sonic-rs skips lazily over the values.

use corelane::config::routes::Body;
use corelane::flow::inspect::{Ask, Inspector};
use divan::counter::BytesCount;
use divan::{Bencher, black_box};
use sonic_rs::JsonValueTrait;
use std::fmt;

fn main() {
    divan::main();
}

/// What a body looks like.
#[derive(Clone, Copy)]
enum Shape {
    Chat(usize),
    Code(usize),
    Chinese(usize),
    Escaped(usize),
    Ids(usize, &'static str),
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Shape::Chat(bytes) => write!(f, "chat of {bytes} B"),
            Shape::Code(bytes) => write!(f, "chat about code of {bytes} B"),
            Shape::Chinese(bytes) => write!(f, "chat in Chinese of {bytes} B"),
            Shape::Escaped(bytes) => write!(f, "the same in ASCII of {bytes} B"),
            Shape::Ids(count, separator) => write!(f, "{count} ids by {separator:?}"),
        }
    }
}

const SHAPES: &[Shape] = &[
    Shape::Chat(300),
    Shape::Chat(8 * 1024),
    Shape::Chat(130 * 1024),
    Shape::Code(1024 * 1024),
    Shape::Chinese(130 * 1024),
    Shape::Escaped(130 * 1024),
    Shape::Ids(32 * 1024, ","),
    Shape::Ids(32 * 1024, ", "),
];

const PROSE: &str = "The gateway reads each byte once and then it lets the engine see the body as it came. ";
const CODE: &str = r#"fn main() {\n    let name = \"w\u00f6rld\";\n\tprintln!(\"hello {name}\");\n}\n\n"#;
const CHINESE: &str = "网关只读取一次每个字节，然后把正文原样交给推理引擎。";

fn chat(bytes: usize, text: &str, message_bytes: usize) -> String {
    let mut body = String::from(
        r#"{"model": "meta-llama/Llama-3.1-8B-Instruct", "temperature": 0.7, "max_tokens": 256, "messages": ["#,
    );
    body.push_str(r#"{"role": "system", "content": "You are helpful."}"#);
    while body.len() + 40 < bytes {
        body.push_str(r#", {"role": "user", "content": ""#);
        let end = (body.len() + message_bytes).min(bytes - 20);
        while body.len() + text.len() <= end {
            body.push_str(text);
        }
        body.push_str("\"}");
        if end == bytes - 20 {
            break;
        }
    }
    body.push_str(r#"], "stream": true}"#);
    body
}

fn body(shape: Shape) -> String {
    match shape {
        Shape::Chat(bytes) => chat(bytes, PROSE, 8 * 1024),
        Shape::Code(bytes) => chat(bytes, CODE, 8 * 1024),
        Shape::Chinese(bytes) => chat(bytes, CHINESE, 8 * 1024),
        Shape::Escaped(bytes) => {
            let escaped: String = CHINESE.encode_utf16().map(|unit| format!("\\u{unit:04x}")).collect();
            chat(bytes, &escaped, 8 * 1024)
        }
        Shape::Ids(count, separator) => {
            let ids: Vec<String> = (0..count).map(|i| (i * 7919 % 128_256).to_string()).collect();
            format!("{{\"model\": \"m\", \"input_ids\": [{}], \"stream\": false}}", ids.join(separator))
        }
    }
}

fn inspect(inspector: &mut Inspector, body: &[u8], piece: usize) -> Ask {
    inspector.begin(Body::Json(&["messages", "input_ids"]), b"application/json");
    let mut end = 0;
    while end < body.len() {
        end = (end + piece).min(body.len());
        inspector.feed(&body[..end]).expect("valid");
    }
    inspector.finish(body).expect("valid")
}

#[divan::bench(args = SHAPES)]
fn corelane_whole(bencher: Bencher, shape: &Shape) {
    let body = body(*shape);
    let mut inspector = Inspector::new();
    bencher
        .counter(BytesCount::of_str(&body))
        .bench_local(|| inspect(&mut inspector, black_box(body.as_bytes()), usize::MAX / 2));
}

#[divan::bench(args = SHAPES)]
fn corelane_in_16_kib_pieces(bencher: Bencher, shape: &Shape) {
    let body = body(*shape);
    let mut inspector = Inspector::new();
    bencher
        .counter(BytesCount::of_str(&body))
        .bench_local(|| inspect(&mut inspector, black_box(body.as_bytes()), 16 * 1024));
}

#[divan::bench(args = SHAPES)]
fn sonic_lazy(bencher: Bencher, shape: &Shape) {
    let body = body(*shape);
    bencher.counter(BytesCount::of_str(&body)).bench_local(|| {
        let mut model = None;
        let mut prompt = None;
        let mut stream = false;
        for member in sonic_rs::to_object_iter(black_box(body.as_bytes())) {
            let (key, value) = member.expect("valid");
            match key.as_ref() {
                "model" => model = Some(value.as_raw_str().len()),
                "messages" | "input_ids" => prompt = Some(value.as_raw_str().len()),
                "stream" => stream = value.as_bool().expect("valid"),
                _ => {}
            }
        }
        (model, prompt, stream)
    });
}
