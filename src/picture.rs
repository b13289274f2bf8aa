//! Pictures on their way into a model: decoded, resized and cut into patches; positions and rotations of the patches. Pure functions over plain data, the same natively and in the browser.
//!
//! ```text
//! bytes -> Picture (RGB8) -> Preprocess::prepare -> Prepared { tiles of Patches, layout }
//!                                                     |-> values    the rows that the vision encoder takes
//!                                                     |-> places    positions::interpolate, rope::grid_angles
//!                                                     '-> layout    Preprocess::text
//! ```
//!
//! Patches are in *merge-block order*: block by block of `merge x merge` neighbours, row by row, and within a block row
//! by row. What merges, un-shuffles or pools neighbours is then a view of consecutive rows.

#[cfg(feature = "pictures")]
mod decode;
mod family;
mod fit;
mod limit;
pub mod positions;
mod prepare;
mod preprocess;
mod resize;
pub mod rope;

#[cfg(feature = "pictures")]
pub use decode::PictureLimits;
pub use family::{Family, TextPart};
pub use fit::{Fit, Layout};
pub use prepare::{Patches, Prepared};
pub use preprocess::{PixelOrder, Preprocess};
pub use resize::Filter;

use crate::error::Error;

/// Pixels that a picture can have in any size on its way, 67 million: 192 MiB as RGB8.
pub const MAX_PIXELS: u64 = 1 << 26;

/// A picture: 8 bits for each of red, green and blue, rows from the top, without padding.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Picture {
    width: u32,
    height: u32,
    rgb: Vec<u8>,
}

impl Picture {
    /// From pixels, `[height, width, 3]`.
    ///
    /// # Errors
    /// [`Error::Operand`] if a side is zero, there are over [`MAX_PIXELS`], or `rgb` has another length.
    pub fn new(width: u32, height: u32, rgb: Vec<u8>) -> Result<Picture, Error> {
        check_pixels(width, height, 3, rgb.len())?;
        Ok(Picture { width, height, rgb })
    }

    /// From pixels with alpha, `[height, width, 4]`, as browsers have them. Alpha is dropped and colours are kept, as
    /// Pillow's `convert("RGB")` does, so they must not be multiplied by it.
    ///
    /// # Errors
    /// As [`Picture::new`].
    pub fn from_rgba(width: u32, height: u32, rgba: &[u8]) -> Result<Picture, Error> {
        check_pixels(width, height, 4, rgba.len())?;
        let rgb = rgba.as_chunks().0.iter().flat_map(|[red, green, blue, _alpha]| [*red, *green, *blue]).collect();
        Ok(Picture { width, height, rgb })
    }

    /// Pixels in a row.
    pub fn width(&self) -> u32 {
        self.width
    }

    /// Rows.
    pub fn height(&self) -> u32 {
        self.height
    }

    /// The pixels, `[height, width, 3]`.
    pub fn rgb(&self) -> &[u8] {
        &self.rgb
    }
}

fn check_pixels(width: u32, height: u32, n_channels: u64, n_bytes: usize) -> Result<(), Error> {
    let n_pixels = u64::from(width) * u64::from(height);
    let refused = |operand, expected, found| Err(Error::Operand { kernel: "picture", operand, expected, found });
    if n_pixels == 0 || n_pixels > MAX_PIXELS {
        return refused("size", format!("1 to {MAX_PIXELS} pixels"), format!("{width} x {height}"));
    }
    match n_pixels * n_channels == n_bytes as u64 {
        true => Ok(()),
        false => refused("pixels", format!("{} bytes", n_pixels * n_channels), format!("{n_bytes} bytes")),
    }
}
