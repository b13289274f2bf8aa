//! The OpenAPI document of the server. For fields, see the named interface.

use serde_json::{Map, Value as Json, json};

/// Method, path, summary, and required fields.
pub const ENDPOINTS: [(&str, &str, &str, &[&str]); 19] = [
    ("post", "/v1/chat/completions", "Answers a conversation, like OpenAI's Chat Completions", &["model", "messages"]),
    ("post", "/v1/completions", "Continues texts, like OpenAI's Completions", &["model", "prompt"]),
    ("post", "/v1/responses", "Answers an input, like OpenAI's Responses", &["model", "input"]),
    ("post", "/v1/embeddings", "Computes embeddings, like OpenAI's Embeddings", &["model", "input"]),
    (
        "post",
        "/v1/rerank",
        "Ranks documents by a query, like Cohere's and Jina's Rerank",
        &["model", "query", "documents"],
    ),
    ("get", "/v1/models", "Lists the models", &[]),
    ("get", "/v1/models/{name}", "A model", &[]),
    ("post", "/v1/models/{name}/load", "Loads a model", &[]),
    ("post", "/v1/models/{name}/unload", "Unloads a model once its requests are done", &[]),
    ("post", "/api/generate", "Continues or answers a text, as Ollama's", &["model"]),
    ("post", "/api/chat", "Answers a conversation, as Ollama's", &["model"]),
    ("post", "/api/embed", "Computes embeddings, as Ollama's", &["model", "input"]),
    ("get", "/api/tags", "Lists the models, as Ollama's", &[]),
    ("get", "/api/ps", "Lists the loaded models, as Ollama's", &[]),
    ("post", "/api/show", "Shows a model, as Ollama's", &["model"]),
    ("get", "/api/version", "The server's version", &[]),
    ("get", "/health", "Whether the server is up; needs no key", &[]),
    ("get", "/metrics", "Metrics in Prometheus's text format", &[]),
    ("get", "/openapi.json", "This document", &[]),
];

/// The OpenAPI document.
pub fn document() -> Json {
    let mut paths = Map::new();
    for (method, path, summary, required) in ENDPOINTS {
        let answers = json!({
            "200": {"description": "Done."},
            "4XX": {"$ref": "#/components/responses/Error"},
            "5XX": {"$ref": "#/components/responses/Error"},
        });
        let mut operation = json!({"summary": summary, "responses": answers});
        if !required.is_empty() {
            let schema = json!({"type": "object", "required": required});
            operation["requestBody"] = json!({"required": true, "content": {"application/json": {"schema": schema}}});
        }
        if path.contains("{name}") {
            operation["parameters"] =
                json!([{"name": "name", "in": "path", "required": true, "schema": {"type": "string"}}]);
        }
        if path == "/health" {
            operation["security"] = json!([]);
            operation["responses"]["503"] = json!({"description": "A model's engine has stopped."});
        }
        let entry = paths.entry(path).or_insert_with(|| json!({}));
        entry[method] = operation;
    }
    let error = json!({
        "type": "object",
        "required": ["message", "type", "param", "code"],
        "properties": {
            "message": {"type": "string"},
            "type": {"type": "string"},
            "param": {"type": ["string", "null"]},
            "code": {"type": "string"},
        },
    });
    let body = json!({"type": "object", "required": ["error"], "properties": {"error": error}});
    json!({
        "openapi": "3.1.0",
        "info": {"title": "tilewright", "version": env!("CARGO_PKG_VERSION")},
        "paths": paths,
        "components": {
            "responses": {
                "Error": {
                    "description": "An error in OpenAI's format; paths under /api have a string in `error`, as Ollama's.",
                    "content": {"application/json": {"schema": body}},
                },
            },
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    })
}
