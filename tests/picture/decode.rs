//! Decoding, compared with Pillow; limits; and input that is no picture.

use tilewright::Error;
use tilewright::picture::{Filter, Picture, PictureLimits};

use super::bombs::{self, Outcome};
use super::{Pixels, message_of, path};
use crate::common;

/// Pictures of odd sizes, depths and formats, by their names in the test data.
fn odd() -> Vec<(String, Vec<u8>)> {
    let entries = std::fs::read_dir(path("odd")).unwrap().map(|entry| entry.unwrap());
    let named =
        entries.map(|entry| (format!("odd/{}", entry.file_name().display()), std::fs::read(entry.path()).unwrap()));
    let mut files: Vec<_> = named.collect();
    files.sort();
    assert!(files.len() > 30);
    files
}

fn decode(bytes: &[u8]) -> Result<Picture, Error> {
    Picture::decode(bytes, &PictureLimits::default())
}

/// The largest difference of a value.
fn difference(got: &Picture, want: &Picture, what: &str) -> u8 {
    assert_eq!((got.width(), got.height()), (want.width(), want.height()), "{what}");
    got.rgb().iter().zip(want.rgb()).map(|(got, want)| got.abs_diff(*want)).max().unwrap()
}

/// JPEG differs by the rounding of the cosine transform and of chroma; all else is equal.
#[test]
fn pixels_are_those_of_pillow() {
    let pixels = Pixels::open();
    let plain = ["a.png", "b.png", "c.png", "alpha.png", "gray.png", "turned.jpg"];
    let plain = plain.map(|name| (name.to_string(), std::fs::read(path(name)).unwrap()));
    for (name, bytes) in odd().into_iter().chain(plain) {
        let mut picture = decode(&bytes).unwrap();
        if name == "odd/large.png" {
            assert_eq!((picture.width(), picture.height()), (4000, 3000));
            picture = picture.resize(64, 48, Filter::Bicubic).unwrap();
        }
        let mut want = pixels.get(&format!("{name}.rgb"));
        if name == "odd/part.gif" {
            (picture, want) = (part(&picture), part(&want));
        }
        let tolerance = if name.ends_with(".jpg") { 3 } else { 0 };
        let largest = difference(&picture, &want, &name);
        assert!(largest <= tolerance, "{name}: {largest}");
    }
}

/// The frame of the GIF file whose screen is larger, which Pillow fills with the first colour, and we with black.
fn part(picture: &Picture) -> Picture {
    let rows = picture.rgb().chunks(picture.width() as usize * 3).skip(5).take(8);
    Picture::new(10, 8, rows.flat_map(|row| &row[6 * 3..16 * 3]).copied().collect()).unwrap()
}

/// A prefix of a file is refused, or has all that the pixels need.
#[test]
fn truncated_files_are_refused() {
    let files: Vec<_> = odd().into_iter().filter(|(_, bytes)| bytes.len() < 7000).collect();
    for (name, bytes) in common::drawn(8, &files) {
        let whole = decode(bytes).unwrap();
        let mut n_refused = 0;
        for len in 0..bytes.len() {
            match decode(&bytes[..len]) {
                Ok(picture) => assert!(picture == whole, "{name}, {len} bytes of {}: other pixels", bytes.len()),
                Err(Error::Format { .. } | Error::Truncated { .. }) => n_refused += 1,
                Err(error) => panic!("{name}, {len} bytes: {error}"),
            }
        }
        assert!(3 * n_refused > bytes.len(), "{name}: {n_refused} of {}", bytes.len());
    }
    let jpeg = std::fs::read(path("turned.jpg")).unwrap();
    let message = "the file ends after 2000 bytes, but the JPEG picture needs at least 2001: download or save it again";
    assert_eq!(message_of(decode(&jpeg[..2000])), message);
}

#[test]
fn bombs_are_refused() {
    for (name, bytes, outcome) in bombs::all() {
        match (decode(&bytes), outcome) {
            (Ok(picture), Outcome::Decoded(width, height)) => {
                assert_eq!((picture.width(), picture.height()), (width, height), "{name}");
            }
            (Err(error), Outcome::Refused(part)) => assert!(error.to_string().contains(part), "{name}: {error}"),
            (result, _) => panic!("{name}: {result:?}"),
        }
    }
}

#[test]
fn other_formats_are_named() {
    let cases: [(&[u8], &str); 16] = [
        (b"", "empty"),
        (b"<?xml version='1.0'?>\n<svg xmlns='http://www.w3.org/2000/svg'/>", "SVG"),
        (b"\xef\xbb\xbf <svg/>", "SVG"),
        (b"<?xml version='1.0'?><note/>", "XML"),
        (b"<!DOCTYPE html><p>404", "HTML"),
        (b"data:image/png;base64,iVBORw0KGgo=", "text"),
        ("ein größerer Text".as_bytes(), "text"),
        (b"%PDF-1.7", "PDF"),
        (b"\0\0\0\x18ftypheic\0\0", "HEIC"),
        (b"\0\0\0\x18ftypmif1\0\0", "HEIC"),
        (b"\0\0\0\x18ftypavif\0\0", "AVIF"),
        (b"\0\0\0\x18ftypisom\0\0", "a video"),
        (b"BM\x36\0\0\0", "BMP"),
        (b"MM\0*\0\0\0\x08", "TIFF"),
        (b"RIFF\0\0\0\0WAVEfmt ", "RIFF without WebP"),
        (b"\x89PNG\r\n\x1a", "unknown"),
    ];
    for (bytes, name) in cases {
        let message = format!("picture: format at byte 0 is {name}, expected PNG, JPEG, WebP or GIF");
        assert_eq!(message_of(decode(bytes)), message);
    }
}

#[test]
fn limits_are_kept() {
    let bytes = std::fs::read(path("a.png")).unwrap();
    let limits = PictureLimits::default();
    let refused = |limits| message_of(Picture::decode(&bytes, &limits));
    let message = "PNG: size is 6305 bytes, which is not supported (supported: at most 6304 bytes)";
    assert_eq!(refused(PictureLimits { max_bytes: 6304, ..limits }), message);
    assert!(refused(PictureLimits { max_pixels: 61 * 47 - 1, ..limits }).contains("61 x 47 pixels"));
    assert!(refused(PictureLimits { max_memory_bytes: 9 * 61 * 47 - 1, ..limits }).contains("25803 bytes"));
    let exact = PictureLimits { max_bytes: 6305, max_pixels: 61 * 47, max_memory_bytes: 9 * 61 * 47 };
    assert!(Picture::decode(&bytes, &exact).is_ok());
}
