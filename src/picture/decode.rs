//! Reading picture files: PNG, JPEG, WebP and GIF, to the pixels that Pillow's `convert("RGB")` gives.
//!
//! Formats are known by their first bytes alone. Sizes are checked before any pixel is decoded.

use std::error::Error as _;
use std::io::{self, Cursor, ErrorKind};

use image::codecs::{gif::GifDecoder, jpeg::JpegDecoder, png::PngDecoder, webp::WebPDecoder};
use image::{ColorType, DynamicImage, ImageDecoder, ImageError, Limits, RgbImage};

use super::{MAX_PIXELS, Picture};
use crate::error::Error;
use crate::formats::named_by_signature;

/// Marker of the end of a JPEG file.
const JPEG_END: u8 = 0xd9;
/// Marker before entropy-coded data.
const JPEG_SCAN: u8 = 0xda;
/// Scans of a JPEG file, each of which may touch all pixels. Encoders make about ten; the decoder stops at 100, but
/// only when it gets there.
const MAX_JPEG_SCANS: usize = 64;
/// Bytes for a file's other parts than pixels, such as a compressed colour profile.
const MAX_EXTRA_BYTES: u64 = 64 << 20;

/// Limits on files, checked before pixels are decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PictureLimits {
    /// Bytes of the file.
    pub max_bytes: u64,
    /// Pixels, never more than [`MAX_PIXELS`].
    pub max_pixels: u64,
    /// Bytes of the decoded picture in the file's own depth, and of the result.
    pub max_memory_bytes: u64,
}

impl Default for PictureLimits {
    /// 32 MiB, [`MAX_PIXELS`] and 1 GiB.
    fn default() -> PictureLimits {
        PictureLimits { max_bytes: 32 << 20, max_pixels: MAX_PIXELS, max_memory_bytes: 1 << 30 }
    }
}

#[derive(Clone, Copy)]
enum Format {
    Png,
    Jpeg,
    WebP,
    Gif,
}

impl Format {
    fn name(self) -> &'static str {
        match self {
            Format::Png => "PNG",
            Format::Jpeg => "JPEG",
            Format::WebP => "WebP",
            Format::Gif => "GIF",
        }
    }
}

impl Picture {
    /// Decodes a PNG, JPEG, WebP or GIF file.
    ///
    /// The result is turned as its EXIF data says. Of an animation it is the first frame. Alpha is dropped and colours
    /// are kept. Of 16 bits the upper 8 remain, but 16-bit grey is white from 255 on, as Pillow has it. Pixels are
    /// those of Pillow; those of JPEG files differ from it by the rounding of the decoder, and the
    /// first frame of a GIF file is black where it has no pixels.
    ///
    /// # Errors
    /// [`Error::Format`] if the file is of another format, which it names, or broken; [`Error::Truncated`] if it ends
    /// early; [`Error::Unsupported`] if it exceeds a limit or uses a rare feature.
    pub fn decode(bytes: &[u8], limits: &PictureLimits) -> Result<Picture, Error> {
        let format = sniff(bytes)?;
        if bytes.len() as u64 > limits.max_bytes {
            let (found, supported) = (format!("{} bytes", bytes.len()), format!("at most {} bytes", limits.max_bytes));
            return Err(Error::Unsupported { format: format.name(), field: "size".into(), found, supported });
        }
        let failed = |error| refused(error, format, bytes.len());
        let input = Cursor::new(bytes);
        match format {
            Format::Png => {
                let limits_of_chunks = memory(MAX_EXTRA_BYTES);
                read(PngDecoder::with_limits(input, limits_of_chunks).map_err(failed)?, format, bytes, limits)
            }
            Format::Jpeg => {
                check_scans(bytes)?;
                read(JpegDecoder::new(input).map_err(failed)?, format, bytes, limits)
            }
            Format::WebP => {
                check_chunks(bytes, limits.max_pixels.min(MAX_PIXELS))?;
                read(WebPDecoder::new(input).map_err(failed)?, format, bytes, limits)
            }
            Format::Gif => read(GifDecoder::new(input).map_err(failed)?, format, bytes, limits),
        }
    }
}

/// The pixels of a decoder that has read its header.
fn read(
    mut decoder: impl ImageDecoder,
    format: Format,
    bytes: &[u8],
    limits: &PictureLimits,
) -> Result<Picture, Error> {
    let failed = |error| refused(error, format, bytes.len());
    let (width, height) = decoder.dimensions();
    let n_pixels = u64::from(width) * u64::from(height);
    let (max_pixels, needed_bytes) =
        (limits.max_pixels.min(MAX_PIXELS), decoder.total_bytes().saturating_add(6 * n_pixels));
    if n_pixels == 0 || n_pixels > max_pixels || needed_bytes > limits.max_memory_bytes {
        let supported = format!("1 to {max_pixels} pixels in {} bytes of memory", limits.max_memory_bytes);
        let (field, found) = ("size".into(), format!("{width} x {height} pixels in {needed_bytes} bytes"));
        return Err(Error::Unsupported { format: format.name(), field, found, supported });
    }
    // Every 8 x 8 pixels of a JPEG file take at least one bit; the decoder would make missing pixels grey.
    let least_bytes = u64::from(width).div_ceil(8) * u64::from(height).div_ceil(8) / 8;
    if matches!(format, Format::Jpeg) && (bytes.len() as u64) < least_bytes {
        return Err(truncated(format, least_bytes, bytes.len()));
    }
    // A frame of a GIF file may be larger than its picture.
    decoder.set_limits(memory(2 * decoder.total_bytes() + MAX_EXTRA_BYTES)).map_err(failed)?;
    let orientation = decoder.orientation().map_err(failed)?;
    let color = decoder.color_type();
    let mut pixels = vec![0; decoder.total_bytes() as usize];
    decoder.read_image(&mut pixels).map_err(failed)?;
    let rgb = to_rgb(pixels, color);
    let broken = || Error::Format {
        format: format.name(),
        field: "picture".into(),
        offset: 0,
        expected: format!("{width} x {height} pixels"),
        found: format!("of type {color:?}"),
    };
    let mut turned = DynamicImage::ImageRgb8(RgbImage::from_raw(width, height, rgb).ok_or_else(broken)?);
    turned.apply_orientation(orientation);
    let turned = turned.into_rgb8();
    Picture::new(turned.width(), turned.height(), turned.into_raw())
}

/// Colours without alpha, grey as three equal ones, and of 16 bits the upper half, or the nearest value for grey alone.
fn to_rgb(pixels: Vec<u8>, color: ColorType) -> Vec<u8> {
    let values =
        |pixels: &[u8]| pixels.as_chunks().0.iter().map(|value| u16::from_ne_bytes(*value)).collect::<Vec<_>>();
    let halved = |pixels: &[u8]| values(pixels).iter().map(|value| (value >> 8) as u8).collect();
    let clipped = |pixels: &[u8]| values(pixels).iter().map(|value| (*value).min(255) as u8).collect();
    match color {
        ColorType::L8 => pixels.iter().flat_map(|&grey| [grey; 3]).collect(),
        ColorType::La8 => pixels.as_chunks().0.iter().flat_map(|&[grey, _alpha]| [grey; 3]).collect(),
        ColorType::Rgba8 => pixels.as_chunks().0.iter().flat_map(|&[red, green, blue, _]| [red, green, blue]).collect(),
        ColorType::L16 => to_rgb(clipped(&pixels), ColorType::L8),
        ColorType::La16 => to_rgb(halved(&pixels), ColorType::La8),
        ColorType::Rgb16 => halved(&pixels),
        ColorType::Rgba16 => to_rgb(halved(&pixels), ColorType::Rgba8),
        _ => pixels,
    }
}

/// A limit on a decoder's allocations.
fn memory(max_bytes: u64) -> Limits {
    let mut limits = Limits::no_limits();
    limits.max_alloc = Some(max_bytes);
    limits
}

/// The error of a decoder.
fn refused(error: ImageError, format: Format, n_bytes: usize) -> Error {
    let unsupported = |field: &str, found: String, supported: &str| Error::Unsupported {
        format: format.name(),
        field: field.into(),
        found,
        supported: supported.into(),
    };
    match error {
        error if is_end_of_file(&error) => truncated(format, n_bytes as u64 + 1, n_bytes),
        ImageError::Limits(error) => unsupported("memory", error.to_string(), "what the picture's size needs"),
        ImageError::Unsupported(error) => unsupported("kind", error.to_string(), "what encoders write"),
        error => Error::Format {
            format: format.name(),
            field: "picture".into(),
            offset: 0,
            expected: "one that can be decoded".into(),
            found: format!("broken ({})", error.to_string().escape_debug()),
        },
    }
}

/// Whether a decoder found the file to end early.
fn is_end_of_file(error: &ImageError) -> bool {
    let is_end = |error: &io::Error| error.kind() == ErrorKind::UnexpectedEof;
    let mut source = error.source();
    while let Some(error) = source {
        if error.downcast_ref::<io::Error>().is_some_and(is_end) {
            return true;
        }
        source = error.source();
    }
    matches!(error, ImageError::IoError(error) if is_end(error))
}

fn truncated(format: Format, needed_bytes: u64, n_bytes: usize) -> Error {
    let part = format!("the {} picture", format.name());
    Error::Truncated { part, needed_bytes, found_bytes: n_bytes as u64 }
}

/// Whether a JPEG file has its end, and not too many scans.
fn check_scans(bytes: &[u8]) -> Result<(), Error> {
    let mut rest = bytes.get(2..).unwrap_or_default();
    // Segments before the first scan, which may hold a smaller picture with an end of its own.
    while let [0xff, marker, tail @ ..] = rest {
        rest = match (*marker, tail) {
            (0xff, _) => &rest[1..],
            (JPEG_SCAN, _) => break,
            (_, [high, low, ..]) => {
                let len = usize::from(u16::from_be_bytes([*high, *low]));
                tail.get(len.max(2)..).unwrap_or_default()
            }
            _ => &[],
        };
    }
    // Entropy-coded data has no markers in it.
    let markers = rest.windows(2).filter(|pair| pair[0] == 0xff).map(|pair| pair[1]);
    if !markers.clone().any(|marker| marker == JPEG_END) {
        return Err(truncated(Format::Jpeg, bytes.len() as u64 + 1, bytes.len()));
    }
    let n_scans = markers.filter(|marker| *marker == JPEG_SCAN).count();
    if n_scans > MAX_JPEG_SCANS {
        let (field, found) = ("number of scans".into(), n_scans.to_string());
        let supported = format!("up to {MAX_JPEG_SCANS}");
        return Err(Error::Unsupported { format: Format::Jpeg.name(), field, found, supported });
    }
    Ok(())
}

/// Whether a WebP file has its chunks, and no frame is too large: the decoder would allocate what they claim to have.
fn check_chunks(bytes: &[u8], max_pixels: u64) -> Result<(), Error> {
    let word =
        |at: usize| bytes.get(at..).and_then(|rest| rest.first_chunk()).map_or(0, |word| u32::from_le_bytes(*word));
    let end = (word(4) as usize).saturating_add(8).min(bytes.len());
    let mut at = 12;
    while at + 8 <= end {
        let (name, data) = (&bytes[at..at + 4], at + 8);
        let after = data as u64 + u64::from(word(at + 4));
        if after > bytes.len() as u64 {
            return Err(truncated(Format::WebP, after, bytes.len()));
        }
        let size = match name {
            b"VP8 " => [word(data + 6), word(data + 6) >> 16].map(|side| side & 0x3fff),
            b"VP8L" => [word(data + 1), word(data + 1) >> 14].map(|side| (side & 0x3fff) + 1),
            _ => [0, 0],
        };
        if u64::from(size[0]) * u64::from(size[1]) > max_pixels {
            let (field, found) = ("size of a frame".into(), format!("{} x {} pixels", size[0], size[1]));
            let supported = format!("at most {max_pixels} pixels");
            return Err(Error::Unsupported { format: Format::WebP.name(), field, found, supported });
        }
        // The frame of an animation has a header, then chunks.
        at = if name == b"ANMF" { data + 16 } else { (after as usize).next_multiple_of(2) };
    }
    Ok(())
}

/// The format by the first bytes.
fn sniff(bytes: &[u8]) -> Result<Format, Error> {
    let is_webp = bytes.starts_with(b"RIFF") && bytes.get(8..12) == Some(b"WEBP");
    match bytes {
        [0x89, b'P', b'N', b'G', 0x0d, 0x0a, 0x1a, 0x0a, ..] => Ok(Format::Png),
        [0xff, 0xd8, 0xff, ..] => Ok(Format::Jpeg),
        [b'G', b'I', b'F', b'8', b'7' | b'9', b'a', ..] => Ok(Format::Gif),
        _ if is_webp => Ok(Format::WebP),
        _ => {
            let expected = "PNG, JPEG, WebP or GIF".into();
            let (field, found) = ("format".into(), other_format(bytes).into());
            Err(Error::Format { format: "picture", field, offset: 0, expected, found })
        }
    }
}

/// The name of a format that is not supported.
fn other_format(bytes: &[u8]) -> &'static str {
    /// Offset, bytes there, and the format's name.
    const SIGNATURES: [(usize, &[u8], &str); 16] = [
        (0, b"%PDF", "PDF"),
        (0, b"BM", "BMP"),
        (0, b"II*\0", "TIFF"),
        (0, b"MM\0*", "TIFF"),
        (0, b"\0\0\x01\0", "ICO"),
        (0, b"\xff\x0a", "JPEG XL"),
        (4, b"JXL ", "JPEG XL"),
        (4, b"jP  ", "JPEG 2000"),
        (4, b"ftypavi", "AVIF"),
        (4, b"ftyphe", "HEIC"),
        (4, b"ftypmif1", "HEIC"),
        (4, b"ftypmsf1", "HEIC"),
        (4, b"ftyp", "a video"),
        (0, b"RIFF", "RIFF without WebP"),
        (0, b"PK\x03\x04", "a ZIP archive"),
        (0, b"8BPS", "a Photoshop file"),
    ];
    if let Some(name) = named_by_signature(bytes, &SIGNATURES) {
        return name;
    }
    let head = &bytes[..bytes.len().min(1024)];
    let text = String::from_utf8_lossy(head).to_ascii_lowercase();
    let begins =
        |tags: &[&str]| tags.iter().any(|tag| text.trim_start_matches('\u{feff}').trim_start().starts_with(tag));
    match head {
        [] => "empty",
        _ if begins(&["<svg", "<?xml", "<!--", "<!doctype svg"]) && text.contains("<svg") => "SVG",
        _ if begins(&["<!doctype html", "<html", "<head", "<body"]) => "HTML",
        _ if begins(&["<?xml"]) => "XML",
        _ if head.iter().all(|byte| *byte >= b' ' || byte.is_ascii_whitespace()) => "text",
        _ => "unknown",
    }
}
