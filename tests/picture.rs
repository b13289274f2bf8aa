//! Pictures: decoding, resizing, preprocessing, positions. References by Pillow and by the processors of transformers,
//! see `scripts/picture_data.py`.

use std::path::PathBuf;

use serde_json::Value;
use tilewright::Error;
use tilewright::picture::Picture;

use crate::common::{self, References};

#[cfg(feature = "pictures")]
pub mod bombs;
#[cfg(feature = "pictures")]
mod decode;
mod positions;
mod prepare;
mod resize;

/// A file of the test data.
fn path(name: &str) -> PathBuf {
    common::find_data(std::path::Path::new("pictures")).expect("committed test data").join(name)
}

fn json(name: &str) -> Value {
    serde_json::from_slice(&std::fs::read(path(name)).unwrap()).unwrap()
}

/// Pixels by Pillow.
struct Pixels(References);

impl Pixels {
    fn open() -> Pixels {
        Pixels(References::open(&path("pixels.safetensors")))
    }

    /// A picture by its name in the file.
    fn get(&self, name: &str) -> Picture {
        let shape = self.0.shape(name);
        Picture::new(shape[1] as u32, shape[0] as u32, self.0.bytes(name).to_vec()).unwrap()
    }
}

/// The message of an error.
fn message_of<T: std::fmt::Debug>(result: Result<T, Error>) -> String {
    result.unwrap_err().to_string()
}

#[test]
fn pixels_are_checked() {
    let picture = Picture::new(2, 1, vec![1, 2, 3, 4, 5, 6]).unwrap();
    assert_eq!((picture.width(), picture.height(), picture.rgb()), (2, 1, &[1, 2, 3, 4, 5, 6][..]));
    assert_eq!(Picture::from_rgba(2, 1, &[1, 2, 3, 0, 4, 5, 6, 9]).unwrap(), picture);
    assert_eq!(message_of(Picture::new(2, 2, vec![0; 11])), "picture: `pixels` is 11 bytes, expected 12 bytes");
    assert_eq!(message_of(Picture::from_rgba(1, 1, &[0; 3])), "picture: `pixels` is 3 bytes, expected 4 bytes");
    assert_eq!(message_of(Picture::new(0, 7, vec![])), "picture: `size` is 0 x 7, expected 1 to 67108864 pixels");
    assert!(message_of(Picture::new(u32::MAX, u32::MAX, vec![])).contains("`size` is 4294967295 x 4294967295"));
}
