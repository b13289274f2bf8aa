//! `tilewright bench --html`: the page `www/dashboard.html` with its data, scripts and style in one file.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tilewright::Error;

use super::super::{CommandFailure, read_text};

/// The parts of the page to fill in.
const POLICY: [&str; 2] = ["<meta http-equiv=\"Content-Security-Policy\" content=\"", "\">"];
const STYLE: &str = "<link rel=\"stylesheet\" href=\"dashboard.css\">";
const SCRIPT: &str = "<script type=\"module\" src=\"dashboard.js\"></script>";

/// A page to fill in, and its output path.
pub struct HtmlPage {
    to: PathBuf,
    html: String,
    css: String,
    js: String,
}

fn io(path: &Path) -> impl FnOnce(std::io::Error) -> Error + '_ {
    |source| Error::Io { path: path.into(), source }
}

impl HtmlPage {
    /// Reads the page's parts, before anything is measured.
    ///
    /// # Errors
    /// [`Error::Option`] for a folder without the page, or an output that is not an HTML file.
    pub fn open(to: &Path, folder: &Path) -> Result<HtmlPage, Error> {
        let is_page = |name: &str| name.ends_with(".html") || name.ends_with(".htm");
        if !to.file_name().and_then(|name| name.to_str()).is_some_and(is_page) || to.is_dir() {
            let (expected, found) = ("a file that ends in .html".into(), to.display().to_string());
            return Err(Error::Option { option: "html", expected, found });
        }
        let read = |name: &str| {
            let text = fs::read_to_string(folder.join(name)).ok()?;
            // Source maps only work beside the source files.
            let lines = text.lines().filter(|line| !line.contains("# sourceMappingURL="));
            Some(lines.collect::<Vec<_>>().join("\n"))
        };
        let wrong = || Error::Option {
            option: "page",
            expected: "the folder that scripts/build-web makes".into(),
            found: folder.display().to_string(),
        };
        let page = match (read("dashboard.html"), read("dashboard.css"), read("dashboard.js")) {
            (Some(html), Some(css), Some(js)) => HtmlPage { to: to.into(), html, css, js },
            _ => return Err(wrong()),
        };
        let has = |part: &str| page.html.matches(part).count() == 1;
        // Neither may end the element that it is put into.
        let is_safe = !page.js.contains("</script") && !page.css.contains("</style");
        match [POLICY[0], STYLE, SCRIPT].into_iter().all(has) && is_safe {
            true => Ok(page),
            false => Err(wrong()),
        }
    }

    /// Writes the page with its data.
    pub fn write(&self, parts: &[Value]) -> Result<(), CommandFailure> {
        let time = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
        let data = json!({
            "schema": "tilewright-dashboard/1",
            "tilewright": env!("CARGO_PKG_VERSION"),
            "unix_time": time,
            "parts": parts,
        });
        let html = self.filled(&data).ok_or_else(|| Error::Option {
            option: "page",
            expected: "the folder that scripts/build-web makes".into(),
            found: "a page without a Content-Security-Policy".into(),
        })?;
        fs::write(&self.to, html).map_err(io(&self.to))?;
        say!("wrote {}", self.to.display());
        Ok(())
    }

    fn filled(&self, data: &Value) -> Option<String> {
        let hash = |text: &str| format!("'sha256-{}'", STANDARD.encode(Sha256::digest(text)));
        let policy = format!(
            "default-src 'none'; script-src {}; style-src {}; img-src data:; base-uri 'none'; form-action 'none'",
            hash(&self.js),
            hash(&self.css),
        );
        // A data block is not run, but its text must not end it.
        let data = data.to_string().replace('<', "\\u003c");
        let (before, rest) = self.html.split_once(POLICY[0])?;
        let (_, after) = rest.split_once(POLICY[1])?;
        let html = format!("{before}{}{policy}{}{after}", POLICY[0], POLICY[1]);
        let (before, after) = html.split_once(STYLE)?;
        let html = format!("{before}<style>{}</style>{after}", self.css);
        let (before, after) = html.split_once(SCRIPT)?;
        let js = &self.js;
        Some(format!(
            "{before}<script type=\"application/json\" id=\"data\">{data}</script>\n<script type=\"module\">{js}</script>{after}"
        ))
    }
}

/// The `--json` output of other benches.
///
/// # Errors
/// [`Error::Io`] for unreadable files, [`Error::Option`] for files without such output.
pub fn read(paths: &[PathBuf]) -> Result<Vec<Value>, Error> {
    let mut parts = Vec::new();
    for path in paths {
        let text = read_text(path)?;
        let value: Value = serde_json::from_str(&text).unwrap_or_default();
        if !value["bench"].is_string() {
            let (expected, found) = ("files that a bench wrote with --json".into(), path.display().to_string());
            return Err(Error::Option { option: "with", expected, found });
        }
        parts.push(value);
    }
    Ok(parts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn html_report_embeds_its_data_and_blocks_other_scripts() {
        let html = format!("<head>{}default-src 'self'{}\n{STYLE}</head>{SCRIPT}", POLICY[0], POLICY[1]);
        let page = HtmlPage { to: "page.html".into(), html, css: "a{}".into(), js: "b()".into() };
        let filled = page.filled(&json!({"name": "</script><script>alert(1)</script>"})).unwrap();
        // `printf 'b()' | openssl dgst -sha256 -binary | base64`
        let hashes = ["cf242PFc/kb7xD0Qzhsmd9vvRkc+cWFmbi+k+YvtdKc=", "X1RutGBrXCt9KkSaXMK7tHftWiRscFHOhxsS8tv8hBk="];
        assert!(hashes.iter().all(|hash| filled.contains(&format!("-src 'sha256-{hash}'"))), "{filled}");
        assert_eq!(filled.matches("<script").count(), 2, "{filled}");
        assert!(!filled.contains("'self'") && filled.contains("<style>a{}</style>"), "{filled}");
        assert!(filled.contains(r#"{"name":"\u003c/script>\u003cscript>alert(1)\u003c/script>"}"#), "{filled}");
    }
}
