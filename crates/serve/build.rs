//! Includes the demo page in the server: all files of the folder in the environment variable `TILEWRIGHT_PAGE`, such as
//! `www/dist`, which `scripts/build-web` makes. Without the variable, none.

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::{env, fs, io};

fn main() -> io::Result<()> {
    println!("cargo::rerun-if-env-changed=TILEWRIGHT_PAGE");
    println!("cargo::rerun-if-changed=build.rs");
    let mut files = Vec::new();
    if let Some(folder) = env::var_os("TILEWRIGHT_PAGE").filter(|folder| !folder.is_empty()) {
        // Relative to the workspace, from which builds are started.
        let root = env::var_os("CARGO_MANIFEST_DIR").map(PathBuf::from).unwrap_or_default().join("../..");
        let folder = root.join(folder).canonicalize()?;
        println!("cargo::rerun-if-changed={}", folder.display());
        collect(&folder, "/", &mut files)?;
        files.sort();
    }
    let mut text = String::from("/// The files of the page, by URL path.\nstatic INCLUDED: &[(&str, &[u8])] = &[");
    for (url, path) in files {
        let _ = write!(text, "\n    ({url:?}, include_bytes!({:?})),", path.display().to_string());
    }
    text.push_str("\n];\n");
    let out = env::var_os("OUT_DIR").map(PathBuf::from).unwrap_or_default();
    fs::write(out.join("page.rs"), text)
}

fn collect(folder: &Path, url: &str, files: &mut Vec<(String, PathBuf)>) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let (path, name) = entry.map(|entry| (entry.path(), entry.file_name()))?;
        let Some(name) = name.to_str().filter(|name| !name.starts_with('.')) else { continue };
        match path.is_dir() {
            true => collect(&path, &format!("{url}{name}/"), files)?,
            false => files.push((format!("{url}{name}"), path)),
        }
    }
    Ok(())
}
