//! Pictures that would take much memory or time, with what they become.

/// What becomes of a file.
pub enum Outcome {
    /// Decoded to this width and height.
    Decoded(u32, u32),
    /// Refused with this in the message.
    Refused(&'static str),
}
use Outcome::{Decoded, Refused};

const TOO_LARGE: Outcome = Refused("65535 x 65535 pixels");

pub fn all() -> Vec<(&'static str, Vec<u8>, Outcome)> {
    let zeros = zeros(1 << 30);
    let pixel = [&[0x78, 0x01, 0x01, 4, 0, 0xfb, 0xff, 0, 1, 2, 3][..], &[0, 14, 0, 7]].concat();
    let profile = [&b"x\0\0"[..], &zeros].concat();
    let jpeg = |height: u16, width: u16, scans: usize| {
        let mut frame = vec![0xff, 0xd8, 0xff, 0xc0, 0, 11, 8];
        frame.extend([height.to_be_bytes(), width.to_be_bytes()].concat());
        frame.extend([1, 1, 0x11, 0]);
        frame.extend([0xff, 0xda, 0, 8, 1, 1, 0, 0, 63, 0, 1, 2, 3].repeat(scans));
        [frame, vec![0xff, 0xd9]].concat()
    };
    let frame = [&b"VP8 \x0a\0\0\0"[..], &[0x10, 0, 0, 0x9d, 1, 0x2a], &[0xff, 0x3f, 0xff, 0x3f]].concat();
    vec![
        ("PNG of 65535 x 65535", png(65_535, 65_535, &[(b"IDAT", &zeros)]), TOO_LARGE),
        ("PNG with a GiB of pixels too many", png(1, 1, &[(b"IDAT", &zeros)]), Decoded(1, 1)),
        ("PNG with a GiB of colour profile", png(1, 1, &[(b"iCCP", &profile), (b"IDAT", &pixel)]), Decoded(1, 1)),
        ("PNG with a GiB of text", png(1, 1, &[(b"zTXt", &profile), (b"IDAT", &pixel)]), Decoded(1, 1)),
        ("PNG without pixels", png(0, 1, &[(b"IDAT", &pixel)]), Refused("PNG: ")),
        ("GIF of 65535 x 65535", gif(65_535, 1), TOO_LARGE),
        ("GIF with a frame of 65535 x 65535", gif(1, 65_535), Refused("GIF: memory")),
        ("GIF without pixels", gif(0, 0), Refused("GIF: size is 0 x 0")),
        ("JPEG of 65535 x 65535", jpeg(65_535, 65_535, 1), TOO_LARGE),
        ("JPEG of 8000 x 8000 in some bytes", jpeg(8000, 8000, 1), Refused("needs at least 125000")),
        ("JPEG with a thousand scans", jpeg(8, 8, 1000), Refused("number of scans is 1000")),
        ("JPEG without pixels", jpeg(0, 8, 1), Refused("JPEG: ")),
        ("WebP of 16777216 x 16777216", webp(1 << 24, &[]), Refused("WebP: ")),
        ("WebP with a frame of 16383 x 16383", webp(1, &frame), Refused("size of a frame is 16383 x 16383")),
        ("WebP with 4 GB of EXIF", webp(1, b"EXIF\xff\xff\xff\xff"), Refused("the WebP picture needs at least")),
    ]
}

/// A PNG file of 8-bit colour.
fn png(width: u32, height: u32, chunks: &[(&[u8; 4], &[u8])]) -> Vec<u8> {
    let header = [&width.to_be_bytes()[..], &height.to_be_bytes(), &[8, 2, 0, 0, 0]].concat();
    let mut file = b"\x89PNG\r\n\x1a\n".to_vec();
    for (name, data) in [(b"IHDR", &header[..])].into_iter().chain(chunks.iter().copied()).chain([(b"IEND", &[][..])]) {
        let named = [&name[..], data].concat();
        file.extend((data.len() as u32).to_be_bytes());
        file.extend(&named);
        file.extend(crc(&named).to_be_bytes());
    }
    file
}

fn crc(bytes: &[u8]) -> u32 {
    let step = |crc: u32, _| (crc >> 1) ^ if crc & 1 == 1 { 0xedb8_8320 } else { 0 };
    !bytes.iter().fold(u32::MAX, |crc, byte| (0..8).fold(crc ^ u32::from(*byte), step))
}

/// About so many zeros in zlib's format: one, then copies of the last 258 bytes, by the fixed codes.
fn zeros(n: usize) -> Vec<u8> {
    let mut bits: Vec<bool> = vec![true, true, false];
    let code = |bits: &mut Vec<bool>, code: u32, n: u32| bits.extend((0..n).rev().map(|bit| code >> bit & 1 == 1));
    code(&mut bits, 0b0011_0000, 8);
    for _ in 0..n / 258 {
        code(&mut bits, 0b1100_0101, 8);
        code(&mut bits, 0, 5);
    }
    code(&mut bits, 0, 7);
    let byte = |bits: &[bool]| bits.iter().rev().fold(0, |byte, bit| byte << 1 | u8::from(*bit));
    let data = bits.chunks(8).map(byte);
    // The checksum is not right; nothing gets there.
    [0x78, 0x01].into_iter().chain(data).chain([0; 4]).collect()
}

/// A GIF file with a square screen and a square frame of one code.
fn gif(screen: u16, frame: u16) -> Vec<u8> {
    let [screen, frame] = [screen, frame].map(u16::to_le_bytes);
    let head = [&b"GIF89a"[..], &screen, &screen, &[0x80, 0, 0], &[0; 6]].concat();
    [&head[..], &[0x2c, 0, 0, 0, 0], &frame, &frame, &[0, 2, 2, 0x4c, 1, 0, 0x3b]].concat()
}

/// An extended WebP file with a square canvas.
fn webp(side: u32, chunks: &[u8]) -> Vec<u8> {
    let [low, middle, high, _] = (side - 1).to_le_bytes();
    let canvas = [low, middle, high].repeat(2);
    let body = [&b"WEBPVP8X"[..], &10u32.to_le_bytes(), &[0x18, 0, 0, 0], &canvas, chunks].concat();
    [&b"RIFF"[..], &(body.len() as u32).to_le_bytes(), &body].concat()
}
