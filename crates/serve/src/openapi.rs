//! The OpenAPI document of the server.

use std::sync::LazyLock;

use serde_json::{Map, Value as Json, json};

use super::schema::{Endpoint, object_schema};
use super::{anthropic, audio, chat, completions, embeddings, llama, ollama, responses, tei, vllm};

/// All endpoints.
pub const ENDPOINTS: &[&Endpoint] = &[
    &chat::ENDPOINT,
    &Endpoint { path: "/chat/completions", ..chat::ENDPOINT },
    &completions::ENDPOINT,
    &responses::ENDPOINT,
    &embeddings::EMBEDDINGS,
    &embeddings::RERANK,
    &Endpoint { path: "/v2/rerank", ..embeddings::RERANK },
    &Endpoint { path: "/v1/reranking", ..embeddings::RERANK },
    &Endpoint { path: "/reranking", ..embeddings::RERANK },
    &audio::TRANSCRIPTIONS,
    &audio::TRANSLATIONS,
    &anthropic::MESSAGES,
    &anthropic::COUNT_TOKENS,
    &Endpoint::get("/v1/models", "Lists the models"),
    &Endpoint::get("/models", "Lists the models"),
    &Endpoint::get("/v1/models/{name}", "A model"),
    &Endpoint::post("/v1/models/{name}/load", "Loads a model", &[]),
    &Endpoint::post("/v1/models/{name}/unload", "Unloads a model once its requests are done", &[]),
    &ollama::GENERATE,
    &ollama::CHAT,
    &ollama::EMBED,
    &ollama::EMBEDDINGS,
    &Endpoint::get("/api/tags", "Lists the models, as Ollama's"),
    &Endpoint::get("/api/ps", "Lists the loaded models, as Ollama's"),
    &ollama::SHOW,
    &ollama::PULL,
    &ollama::COPY,
    &ollama::DELETE,
    &Endpoint::post("/api/create", "Always refused: models are files of the server", &[]),
    &Endpoint::post("/api/push", "Always refused: there is no registry", &[]),
    &Endpoint::post("/api/blobs/{name}", "Always refused, as /api/create", &[]),
    &Endpoint::get("/api/version", "The version of Ollama whose API this is, and the server's own"),
    &llama::COMPLETION,
    &Endpoint { path: "/completions", ..llama::COMPLETION },
    &llama::INFILL,
    &llama::EMBEDDING,
    &llama::TOKENIZE,
    &llama::DETOKENIZE,
    &Endpoint::get("/tokenizer_info", "Special tokens and chat template of a model, like vLLM's"),
    &vllm::SCORE,
    &Endpoint { path: "/v1/score", ..vllm::SCORE },
    &Endpoint::get("/version", "The server's version, like vLLM's"),
    &llama::APPLY_TEMPLATE,
    &Endpoint::get("/props", "The properties of a model, like llama.cpp's"),
    &Endpoint::get("/slots", "The sequences that run at once, like llama.cpp's"),
    &tei::EMBED,
    &tei::RERANK,
    &tei::SIMILARITY,
    &tei::DECODE,
    &Endpoint::get("/info", "Describes an encoder, like TEI's"),
    &Endpoint::get("/health", "Whether the server is up; needs no key"),
    &Endpoint::get("/metrics", "Metrics in Prometheus's text format"),
    &Endpoint::get("/openapi.json", "This document"),
];

/// The OpenAPI document.
pub static DOCUMENT: LazyLock<Json> = LazyLock::new(document);

fn document() -> Json {
    let mut paths = Map::new();
    for &&Endpoint { method, path, summary, media, fields } in ENDPOINTS {
        let answers = json!({
            "200": {"description": "Done."},
            "4XX": {"$ref": "#/components/responses/Error"},
            "5XX": {"$ref": "#/components/responses/Error"},
        });
        let mut operation = json!({"summary": summary, "responses": answers});
        if !fields.is_empty() {
            let schema = object_schema(fields);
            operation["requestBody"] = json!({"required": true, "content": {media: {"schema": schema}}});
        }
        if path.contains("{name}") {
            operation["parameters"] =
                json!([{"name": "name", "in": "path", "required": true, "schema": {"type": "string"}}]);
        }
        if path == "/health" {
            operation["security"] = json!([]);
            operation["responses"]["503"] =
                json!({"description": "Models are being loaded, or a model's engine has stopped."});
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
                    "description": "An error in OpenAI's format; paths of other APIs have the formats of those.",
                    "content": {"application/json": {"schema": body}},
                },
            },
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{}, {"key": []}, {"x-api-key": []}],
    })
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::super::schema::{Field, Kind};
    use super::*;

    fn check(path: &str, rows: &[&[Field]]) {
        let mut names = HashSet::new();
        for row in rows.iter().copied().flatten() {
            assert!(names.insert(row.name), "{path} has two fields {}", row.name);
            if let Kind::Object(nested) = row.kind {
                check(path, nested);
            }
        }
    }

    #[test]
    fn fields_of_an_endpoint_have_different_names() {
        ENDPOINTS.iter().for_each(|endpoint| check(endpoint.path, endpoint.fields));
    }
}
