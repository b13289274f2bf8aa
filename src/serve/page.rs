//! A folder of static files, such as the demo page.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use axum::body::Body;
use axum::http::{HeaderName, HeaderValue, header};
use axum::response::Response;

use crate::error::Error;

/// Files of a folder at most.
const MOST_FILES: usize = 10_000;

/// Headers of each file: pages are isolated from other origins, which threads in a page need, and types are as they are told.
const HEADERS: [(&str, &str); 4] = [
    ("cross-origin-opener-policy", "same-origin"),
    ("cross-origin-embedder-policy", "require-corp"),
    ("x-content-type-options", "nosniff"),
    ("cache-control", "no-cache"),
];

/// The files that were there when the server began, by their paths in addresses. Nothing else is ever looked for, so no address
/// leads out of the folder.
pub struct Page(HashMap<String, PathBuf>);

impl Page {
    /// # Errors
    /// [`Error::Io`] if the folder cannot be read; [`Error::Option`] if it has too many files.
    pub fn open(folder: &Path) -> Result<Page, Error> {
        let mut files = HashMap::new();
        let mut folders = vec![(folder.to_path_buf(), String::from("/"))];
        while let Some((folder, address)) = folders.pop() {
            let failed = |source| Error::Io { path: folder.clone(), source };
            for entry in std::fs::read_dir(&folder).map_err(failed)? {
                let entry = entry.map_err(failed)?;
                let Ok(name) = entry.file_name().into_string() else { continue };
                if name.starts_with('.') {
                    continue;
                }
                // Links are followed: who made the folder put them there.
                match std::fs::metadata(entry.path()) {
                    Ok(about) if about.is_dir() => folders.push((entry.path(), format!("{address}{name}/"))),
                    Ok(about) if about.is_file() => {
                        if name == "index.html" {
                            files.insert(address.clone(), entry.path());
                        }
                        files.insert(format!("{address}{name}"), entry.path());
                    }
                    _ => {}
                }
            }
            if files.len() + folders.len() > MOST_FILES {
                let (expected, found) = (format!("a folder of at most {MOST_FILES} files"), "more".into());
                return Err(Error::Option { option: "page", expected, found });
            }
        }
        Ok(Page(files))
    }

    /// The file at a path, if there is one.
    pub async fn get(&self, path: &str) -> Option<Response> {
        let file = self.0.get(path)?.clone();
        let kind = type_of(&file);
        let bytes = tokio::task::spawn_blocking(move || std::fs::read(file)).await.ok()?.ok()?;
        let mut response = Response::new(Body::from(bytes));
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
        headers.extend(HEADERS.map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value))));
        Some(response)
    }
}

fn type_of(file: &Path) -> &'static str {
    match file.extension().and_then(|extension| extension.to_str()).unwrap_or_default() {
        "html" => "text/html; charset=utf-8",
        "css" => "text/css; charset=utf-8",
        "js" | "mjs" => "text/javascript; charset=utf-8",
        "json" | "map" => "application/json",
        "wasm" => "application/wasm",
        "svg" => "image/svg+xml",
        "png" => "image/png",
        "webp" => "image/webp",
        "ico" => "image/x-icon",
        "txt" | "md" => "text/plain; charset=utf-8",
        _ => "application/octet-stream",
    }
}
