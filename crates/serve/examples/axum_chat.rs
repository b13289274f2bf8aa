//! Streams answers of a chat from an axum handler of one's own, as server-sent events.
//!
//! `cargo run --release -p tilewright-serve --example axum_chat`, then
//! `curl --no-buffer 'http://127.0.0.1:3000/chat?text=Tell%20me%20about%20a%20dragon.'`

use std::convert::Infallible;
use std::sync::Arc;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Query, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use tilewright::answer::Event;
use tilewright::chat::{ChatTemplate, Message};
use tilewright::engine::{Engine, EngineOptions};
use tilewright::{ChatModel, ChatRequest, Device, Error, Model};

struct App {
    /// Computes on a thread of its own, so that handlers never block. Requests share its batches.
    engine: Engine,
    chat: ChatModel,
}

#[derive(serde::Deserialize)]
struct Question {
    text: String,
}

async fn chat(State(app): State<Arc<App>>, Query(question): Query<Question>) -> Response {
    let mut request = ChatRequest::new(vec![Message::new("user", question.text)]);
    request.options.max_tokens = 64;
    let stream = match app.chat.submit(&app.engine, &request) {
        Ok(stream) => stream,
        Err(error @ Error::Busy { .. }) => return (StatusCode::TOO_MANY_REQUESTS, error.to_string()).into_response(),
        Err(error) => return (StatusCode::BAD_REQUEST, error.to_string()).into_response(),
    };
    // A client that disconnects drops the body, and with it the stream, which cancels the request.
    let events = futures_util::stream::unfold(stream, |mut stream| async {
        let text = match stream.next().await? {
            Ok(Event::Text(text)) => format!("data: {}\n\n", serde_json::json!({"text": text})),
            Ok(_) => String::new(),
            Err(error) => format!("event: error\ndata: {}\n\n", serde_json::json!({"error": error.to_string()})),
        };
        Some((Ok::<_, Infallible>(Bytes::from(text)), stream))
    });
    ([(header::CONTENT_TYPE, "text/event-stream")], Body::from_stream(events)).into_response()
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let model = Model::builtin(&Device::auto().await)?; // or Model::load(&device, "model.gguf", Default::default())
    let chat_model = ChatModel::of(&model, ChatTemplate::known("alpaca"))?; // or ChatModel::new(&model)
    let engine = Engine::spawn(&model, &EngineOptions::default())?;
    let app = Arc::new(App { engine, chat: chat_model });
    let router = Router::new().route("/chat", get(chat)).with_state(app);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
    println!("listening on http://{}", listener.local_addr()?);
    axum::serve(listener, router).await?;
    Ok(())
}
