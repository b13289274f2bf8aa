//! Traces, as a test collector parses them: OTLP protobuf, field by field from its numbers.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use serde_json::{Value as Json, json};
use tilewright_serve::{Loaded, ModelSpec, ServerOptions};

use super::audio;
use super::client::{Connection, done, get, post, request, send};
use super::program::{Program, command};
use super::server::{embedder, own, start};

const JSON: (&str, &str) = ("content-type", "application/json");

/// A request received by the collector.
struct Post {
    head: String,
    body: Vec<u8>,
}

struct Collector {
    address: SocketAddr,
    posts: Receiver<Post>,
}

impl Collector {
    /// A collector that receives requests and optionally answers them.
    fn start(answers: bool) -> Collector {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let (sender, posts) = channel();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (stream, sender) = (stream.unwrap(), sender.clone());
                std::thread::spawn(move || {
                    let mut stream = BufReader::new(stream);
                    while let Some(post) = read(&mut stream) {
                        // The test may be over.
                        let _ = sender.send(post);
                        if answers {
                            stream.get_mut().write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").unwrap();
                        }
                    }
                });
            }
        });
        Collector { address, posts }
    }

    fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Requests received from a stopped server.
    fn posts(&self) -> Vec<Post> {
        self.posts.try_iter().collect()
    }

    fn spans(&self) -> Vec<Span> {
        self.posts().iter().flat_map(|post| spans_of(&post.body)).collect()
    }
}

fn read(stream: &mut BufReader<TcpStream>) -> Option<Post> {
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        if stream.read_line(&mut head).ok()? == 0 {
            return None;
        }
    }
    let head = head.to_lowercase();
    let length = head.lines().find_map(|line| line.strip_prefix("content-length:")).unwrap_or_else(|| panic!("{head}"));
    let mut body = vec![0; length.trim().parse().unwrap()];
    stream.read_exact(&mut body).ok()?;
    Some(Post { head, body })
}

/// A field of a message.
enum Field<'a> {
    Number(u64),
    Bytes(&'a [u8]),
}

impl<'a> Field<'a> {
    fn number(&self) -> u64 {
        match self {
            Field::Number(number) => *number,
            Field::Bytes(_) => panic!("bytes in place of a number"),
        }
    }

    fn bytes(&self) -> &'a [u8] {
        match self {
            Field::Bytes(bytes) => bytes,
            Field::Number(_) => panic!("a number in place of bytes"),
        }
    }

    fn text(&self) -> String {
        String::from_utf8(self.bytes().to_vec()).unwrap()
    }

    fn hex(&self) -> String {
        self.bytes().iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

fn varint(bytes: &mut &[u8]) -> u64 {
    let mut number = 0;
    for at in 0.. {
        let (first, rest) = bytes.split_first().unwrap();
        *bytes = rest;
        number |= u64::from(first & 0x7f) << (7 * at);
        if first & 0x80 == 0 {
            break;
        }
    }
    number
}

/// Numbers and values of a message's fields.
fn fields(mut bytes: &[u8]) -> Vec<(u64, Field<'_>)> {
    let mut fields = Vec::new();
    while !bytes.is_empty() {
        let tag = varint(&mut bytes);
        let mut take = |n: usize| {
            let (taken, rest) = bytes.split_at(n);
            bytes = rest;
            taken
        };
        let field = match tag & 7 {
            0 => Field::Number(varint(&mut bytes)),
            1 => Field::Number(u64::from_le_bytes(take(8).try_into().unwrap())),
            2 => {
                let n = varint(&mut bytes);
                let (taken, rest) = bytes.split_at(n as usize);
                bytes = rest;
                Field::Bytes(taken)
            }
            5 => Field::Number(u32::from_le_bytes(take(4).try_into().unwrap()).into()),
            other => panic!("no type of a field: {other}"),
        };
        fields.push((tag >> 3, field));
    }
    fields
}

/// `AnyValue`.
fn value(bytes: &[u8]) -> Json {
    let (number, field) = fields(bytes).pop().unwrap();
    match number {
        1 => field.text().into(),
        2 => (field.number() != 0).into(),
        3 => (field.number() as i64).into(),
        4 => f64::from_bits(field.number()).into(),
        5 => fields(field.bytes()).iter().map(|(_, one)| value(one.bytes())).collect(),
        other => panic!("no kind of a value: {other}"),
    }
}

type Attributes = BTreeMap<String, Json>;

/// Adds a `KeyValue`.
fn add(attributes: &mut Attributes, bytes: &[u8]) {
    let [(1, key), (2, of_key)] = &fields(bytes)[..] else { panic!("no attribute") };
    assert!(attributes.insert(key.text(), value(of_key.bytes())).is_none(), "{} twice", key.text());
}

/// `Span`, with the attributes of its resource.
#[derive(Clone, Debug, Default)]
struct Span {
    resource: Attributes,
    trace: String,
    id: String,
    parent: String,
    name: String,
    kind: u64,
    begin: u64,
    end: u64,
    attributes: Attributes,
    status: u64,
}

const SERVER: u64 = 2;
const INTERNAL: u64 = 1;
const ERROR: u64 = 2;

impl Span {
    fn of(bytes: &[u8], resource: &Attributes) -> Span {
        let mut span = Span { resource: resource.clone(), ..Span::default() };
        for (number, field) in fields(bytes) {
            match number {
                1 => span.trace = field.hex(),
                2 => span.id = field.hex(),
                4 => span.parent = field.hex(),
                5 => span.name = field.text(),
                6 => span.kind = field.number(),
                7 => span.begin = field.number(),
                8 => span.end = field.number(),
                9 => add(&mut span.attributes, field.bytes()),
                15 => {
                    let status = fields(field.bytes());
                    span.status = status.iter().find(|(number, _)| *number == 3).map_or(0, |(_, code)| code.number());
                }
                _ => {}
            }
        }
        span
    }

    fn get(&self, attribute: &str) -> Option<&Json> {
        self.attributes.get(attribute)
    }

    /// Checks its values except those that vary between runs.
    fn has(&self, kind: u64, attributes: &[(&str, Json)]) {
        let own: Attributes = attributes.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect();
        assert_eq!((self.kind, &self.attributes), (kind, &own), "{}", self.name);
        assert!(self.begin > 0 && self.begin <= self.end, "{self:?}");
    }
}

/// The spans of an `ExportTraceServiceRequest`.
fn spans_of(bytes: &[u8]) -> Vec<Span> {
    let mut spans = Vec::new();
    for (_, resource_spans) in fields(bytes) {
        let mut resource = Attributes::new();
        for (number, field) in fields(resource_spans.bytes()) {
            match number {
                1 => fields(field.bytes()).iter().for_each(|(_, attribute)| add(&mut resource, attribute.bytes())),
                2 => {
                    for (_, span) in fields(field.bytes()).iter().filter(|(number, _)| *number == 2) {
                        spans.push(Span::of(span.bytes(), &resource));
                    }
                }
                _ => {}
            }
        }
    }
    spans
}

/// The only span of that name.
fn named<'a>(spans: &'a [Span], name: &str) -> &'a Span {
    let mut found = spans.iter().filter(|span| span.name == name);
    match (found.next(), found.next()) {
        (Some(span), None) => span,
        other => panic!("{name}: {other:?} in {spans:?}"),
    }
}

/// A span's children in order of start.
fn children<'a>(spans: &'a [Span], parent: &Span) -> Vec<&'a Span> {
    let mut children: Vec<&Span> = spans.iter().filter(|span| span.parent == parent.id).collect();
    children.sort_by_key(|span| span.begin);
    assert!(
        children.iter().all(|span| span.trace == parent.trace && span.begin >= parent.begin && span.end <= parent.end)
    );
    children
}

fn names(spans: &[&Span]) -> Vec<String> {
    spans.iter().map(|span| span.name.clone()).collect()
}

const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
const PARENT: &str = "b7ad6b7169203331";

fn parent(flags: &str) -> String {
    format!("00-{TRACE}-{PARENT}-{flags}")
}

fn chat(max_tokens: u32) -> Json {
    let messages = json!([{"role": "user", "content": "a secret word"}]);
    json!({"model": "stories", "messages": messages, "max_tokens": max_tokens, "temperature": 0, "logit_bias": {"2": -100}})
}

fn stages(usage: &Json, index: u32) -> [(&'static str, Vec<(&'static str, Json)>); 3] {
    let index = ("tilewright.choice.index", json!(index));
    let cached = usage["prompt_tokens_details"]["cached_tokens"].clone();
    let input = ("gen_ai.usage.input_tokens", usage["prompt_tokens"].clone());
    [
        ("queue", vec![index.clone()]),
        ("prompt", vec![index.clone(), input, ("gen_ai.usage.cache_read.input_tokens", cached)]),
        (
            "decode",
            vec![
                index,
                ("gen_ai.usage.output_tokens", json!(8)),
                ("gen_ai.response.finish_reasons", json!(["length"])),
            ],
        ),
    ]
}

#[test]
fn request_trace_has_its_stages_and_no_text() {
    let collector = Collector::start(true);
    let endpoint = collector.endpoint();
    let program = Program::start(command(&["--port", "0", "--template", "chatml", "--otlp-endpoint", &endpoint]));
    let asked = chat(8).to_string();
    let headers = [JSON, ("traceparent", &parent("01"))];
    let answer = send(program.address, "POST", "/v1/chat/completions", &headers, asked.as_bytes()).json();
    let text = answer["choices"][0]["message"]["content"].as_str().unwrap();
    let told = program.end();
    assert!(!told.contains("traces"), "{told}");

    let posts = collector.posts();
    for Post { head, body } in &posts {
        assert!(head.starts_with("post /v1/traces http/1.1") && head.contains("application/x-protobuf"), "{head}");
        let body = String::from_utf8_lossy(body);
        assert!(
            !body.contains("secret") && text.split(' ').filter(|word| word.len() > 3).all(|word| !body.contains(word))
        );
    }
    let spans: Vec<Span> = posts.iter().flat_map(|post| spans_of(&post.body)).collect();
    assert_eq!(spans.len(), 5, "{spans:?}");
    assert!(spans.iter().all(|span| span.resource["service.name"] == json!("tilewright") && span.status == 0));

    let server = named(&spans, "POST /v1/chat/completions");
    assert_eq!((server.trace.as_str(), server.parent.as_str()), (TRACE, PARENT));
    server.has(
        SERVER,
        &[
            ("http.request.method", json!("POST")),
            ("http.route", json!("/v1/chat/completions")),
            ("url.path", json!("/v1/chat/completions")),
            ("url.scheme", json!("http")),
            ("http.response.status_code", json!(200)),
        ],
    );
    let [work] = children(&spans, server)[..] else { panic!("{spans:?}") };
    let usage = &answer["usage"];
    let first = work.get("gen_ai.response.time_to_first_chunk").cloned().unwrap();
    assert!(first.as_f64().is_some_and(|seconds| seconds > 0.0), "{first}");
    assert_eq!(work.name, "chat stories");
    work.has(
        INTERNAL,
        &[
            ("gen_ai.operation.name", json!("chat")),
            ("gen_ai.provider.name", json!("tilewright")),
            ("gen_ai.request.model", json!("stories")),
            ("gen_ai.response.time_to_first_chunk", first),
            ("gen_ai.response.finish_reasons", json!(["length"])),
            ("gen_ai.usage.input_tokens", usage["prompt_tokens"].clone()),
            ("gen_ai.usage.cache_read.input_tokens", usage["prompt_tokens_details"]["cached_tokens"].clone()),
            ("gen_ai.usage.output_tokens", json!(8)),
        ],
    );
    let of_work = children(&spans, work);
    assert_eq!(of_work.len(), 3, "{spans:?}");
    for (span, (name, attributes)) in of_work.iter().zip(stages(usage, 0)) {
        assert_eq!(span.name, name);
        span.has(INTERNAL, &attributes);
    }
    // Sequential.
    assert!(of_work.windows(2).all(|two| two[0].end <= two[1].begin), "{of_work:?}");
}

#[test]
fn refusals_and_multiple_answers_have_their_own_spans() {
    let collector = Collector::start(true);
    let mut server = own(|_, options| options.otlp_endpoint = Some(collector.endpoint()));
    let asked = json!({"model": "story", "prompt": ["A", "B"], "n": 2, "max_tokens": 3, "stream": true, "logit_bias": {"2": -100}});
    done(server.address, "/v1/completions", asked);
    assert_eq!(get(server.address, "/a/secret/path").status, 404);
    assert_eq!(post(server.address, "/v1/completions", &json!({"model": "none", "prompt": "A"})).status, 404);
    assert_eq!(send(server.address, "BREW", "/health", &[], &[]).status, 405);
    server.end().join().unwrap();

    let posts = collector.posts();
    assert!(posts.iter().all(|post| !String::from_utf8_lossy(&post.body).contains("secret")));
    let spans: Vec<Span> = posts.iter().flat_map(|post| spans_of(&post.body)).collect();
    let work = named(&spans, "text_completion story");
    assert_eq!(work.get("gen_ai.request.choice.count"), Some(&json!(4)));
    assert_eq!(work.get("gen_ai.response.finish_reasons"), Some(&["length"; 4].into_iter().map(Json::from).collect()));
    assert_eq!(work.get("gen_ai.usage.output_tokens"), Some(&json!(12)));
    let of_work = children(&spans, work);
    for index in 0..4 {
        let of_answer: Vec<&Span> =
            of_work.iter().filter(|span| span.get("tilewright.choice.index") == Some(&json!(index))).copied().collect();
        assert_eq!(names(&of_answer), ["queue", "prompt", "decode"]);
    }
    // An unmatched request has no route and no path; a client error is not a server error.
    named(&spans, "GET").has(
        SERVER,
        &[
            ("http.request.method", json!("GET")),
            ("url.scheme", json!("http")),
            ("http.response.status_code", json!(404)),
        ],
    );
    let brewed = named(&spans, "HTTP /health");
    assert_eq!(brewed.get("http.request.method"), Some(&json!("_OTHER")));
    let refused = spans
        .iter()
        .find(|span| span.name == "POST /v1/completions" && span.get("http.response.status_code") == Some(&json!(404)));
    assert!(refused.is_some_and(|span| children(&spans, span).is_empty() && span.get("error.type").is_none()));
    assert!(spans.iter().all(|span| span.status == 0), "{spans:?}");
}

#[test]
fn failed_and_cancelled_requests_are_marked_in_spans() {
    let collector = Collector::start(true);
    let endpoint = collector.endpoint();
    let mut command = command(&["--port", "0", "--parallel", "1", "--queue", "1", "--otlp-endpoint", &endpoint]);
    command.env("OTEL_BSP_SCHEDULE_DELAY", "10");
    let program = Program::start(command);
    let long = json!({"model": "stories", "prompt": "A", "n": 128, "max_tokens": 400, "stream": true, "logit_bias": {"2": -100}});
    let mut first = Connection::open(program.address);
    first.write(&request("POST", "/v1/completions", &[JSON], long.to_string().as_bytes()));
    assert_eq!(first.head().status, 200);
    // Its first answer is running and its second one queued, so the queue soon fills.
    let refused = loop {
        let answer =
            post(program.address, "/v1/completions", &json!({"model": "stories", "prompt": "A", "max_tokens": 1}));
        if answer.status != 200 {
            break answer;
        }
    };
    assert_eq!((refused.status, &refused.json()["error"]["code"]), (429, &json!("busy")));
    drop(first);
    // A disconnected client is detected with a delay.
    let mut spans = Vec::new();
    let work = |spans: &[Span], error: &str| {
        spans.iter().find(|span| span.kind == INTERNAL && span.get("error.type") == Some(&json!(error))).cloned()
    };
    while work(&spans, "cancelled").is_none() {
        spans.extend(spans_of(&collector.posts.recv_timeout(Duration::from_secs(60)).unwrap().body));
    }
    program.end();
    spans.extend(collector.spans());

    let busy = work(&spans, "busy").unwrap();
    assert_eq!((busy.name.as_str(), busy.status), ("text_completion stories", ERROR));
    let given_up = work(&spans, "cancelled").unwrap();
    assert_eq!((given_up.name.as_str(), given_up.status), ("text_completion stories", 0));
    assert!(names(&children(&spans, &given_up)).starts_with(&["queue".into(), "prompt".into(), "decode".into()]));
    // By the conventions, a full queue is not a server error.
    let full = spans.iter().find(|span| span.get("http.response.status_code") == Some(&json!(429))).unwrap();
    assert_eq!((full.id.as_str(), full.status, full.get("error.type")), (busy.parent.as_str(), 0, None));
}

#[test]
fn embeddings_and_transcripts_have_traces() {
    let collector = Collector::start(true);
    let options = ServerOptions { otlp_endpoint: Some(collector.endpoint()), ..ServerOptions::default() };
    let nomic = ModelSpec::new("nomic", 1 << 20, || embedder().map(Loaded::Embedder));
    let mut server = start(vec![nomic, audio::speech()], options);
    let answer =
        done(server.address, "/v1/embeddings", json!({"model": "nomic", "input": ["a secret", "word"]})).json();
    let sound = audio::noise(1000, 3);
    assert_eq!(audio::ask(server.address, audio::PATH, &[("file", Some("a.wav"), &sound)]).status, 200);
    server.end().join().unwrap();
    let spans = collector.spans();
    let [work] = children(&spans, named(&spans, "POST /v1/embeddings"))[..] else { panic!("{spans:?}") };
    assert_eq!(work.name, "embeddings nomic");
    assert_eq!(work.get("gen_ai.usage.input_tokens"), Some(&answer["usage"]["prompt_tokens"]));
    assert_eq!(names(&children(&spans, work)), ["queue"]);
    let [work] = children(&spans, named(&spans, "POST /v1/audio/transcriptions"))[..] else { panic!("{spans:?}") };
    assert_eq!(
        (work.name.as_str(), &*names(&children(&spans, work))),
        ("transcription whisper", &["queue".into()][..])
    );
    assert!(work.get("gen_ai.usage.output_tokens").and_then(Json::as_u64) > Some(0), "{work:?}");
}

#[test]
fn otel_environment_variables_configure_the_export() {
    let collector = Collector::start(true);
    let mut command = command(&["--port", "0", "--template", "chatml"]);
    command.env("OTEL_EXPORTER_OTLP_ENDPOINT", format!("{}/", collector.endpoint()));
    command.env("OTEL_EXPORTER_OTLP_HEADERS", "x-tenant=stories").env("OTEL_SERVICE_NAME", "teller");
    command.env("OTEL_TRACES_SAMPLER", "parentbased_traceidratio").env("OTEL_TRACES_SAMPLER_ARG", "0");
    let program = Program::start(command);
    assert_eq!(get(program.address, "/health").status, 200);
    for header in [&parent("00"), &parent("01"), "not one"] {
        assert_eq!(send(program.address, "GET", "/health", &[("traceparent", header)], &[]).status, 200);
    }
    program.end();
    let posts = collector.posts();
    assert!(
        posts.iter().all(|post| post.head.starts_with("post /v1/traces ") && post.head.contains("x-tenant: stories"))
    );
    let spans: Vec<Span> = posts.iter().flat_map(|post| spans_of(&post.body)).collect();
    let [span] = &spans[..] else { panic!("{spans:?}") };
    assert_eq!(
        (span.trace.as_str(), span.parent.as_str(), &span.resource["service.name"]),
        (TRACE, PARENT, &json!("teller"))
    );
}

fn measure(address: SocketAddr, name: &str) -> u64 {
    let text = get(address, "/metrics").text();
    let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix("_total ")?.parse().ok());
    value.unwrap_or_else(|| panic!("no {name} in {text}"))
}

#[test]
fn unreachable_collector_does_not_change_answers() {
    let text = |program: &Program| {
        done(program.address, "/v1/chat/completions", chat(8)).json()["choices"][0]["message"]["content"].clone()
    };
    let args = ["--port", "0", "--template", "chatml"];
    let without = Program::start(command(&args));
    let expected = text(&without);
    assert!(!get(without.address, "/metrics").text().contains("trace_spans"));
    assert!(!without.end().contains("spans"));

    // Nothing listens there any more.
    let away = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let program = Program::start(command(&[&args[..], &["--otlp-endpoint", &format!("http://{away}")]].concat()));
    assert_eq!(text(&program), expected);
    let told = program.end();
    assert!(told.contains("traces cannot be sent") && told.contains("5 spans of traces were not sent"), "{told}");

    let silent = Collector::start(false);
    let mut command = command(&[&args[..], &["--otlp-endpoint", &silent.endpoint()]].concat());
    let program = Program::start({
        command.env("OTEL_BSP_MAX_QUEUE_SIZE", "2");
        command
    });
    assert_eq!(text(&program), expected);
    // Two are queued. The others are dropped as each ends: those of the answer, and of these requests.
    let drops = (0..20).map(|_| measure(program.address, "tilewright_trace_spans_dropped"));
    assert!(drops.max() >= Some(10));
    assert_eq!(measure(program.address, "tilewright_trace_spans_sent"), 0);
    assert_eq!(text(&program), expected);
    assert!(program.end().contains("spans of traces were not sent"));
}

#[test]
fn malformed_otlp_endpoint_is_refused() {
    for endpoint in ["localhost", "localhost:4318", "ftp://localhost", "http://"] {
        let output = command(&["--port", "0", "--otlp-endpoint", endpoint]).output().unwrap();
        let message = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.code() == Some(2) && message.contains("--otlp-endpoint"), "{endpoint}: {message}");
    }
}
