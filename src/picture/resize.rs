//! Resizing as Pillow does it, equal to it bit by bit: the filter is widened by the scale when shrinking, weights are
//! rounded to 22 bits, rows come first, then columns, and values are rounded to 8 bits between the two.
//!
//! Definition: `src/libImaging/Resample.c` of Pillow. A drawing surface of a browser resizes otherwise, by up to 109 of
//! 255.

use std::ops::Range;

use super::{MAX_PIXELS, Picture};
use crate::error::Error;

/// The longest side of a result.
const MAX_SIDE: u32 = 1 << 16;

/// Bits of a weight behind the point.
const BITS: u32 = 22;
/// Half of the last bit kept: a sum starts with it, so that its end is rounded.
const HALF: i32 = 1 << (BITS - 1);

/// A filter of Pillow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Filter {
    /// A triangle over two pixels.
    Bilinear,
    /// Keys' cubic with a = -1/2, over four pixels.
    Bicubic,
    /// A windowed sinc over six pixels.
    Lanczos,
}

impl Filter {
    /// The filter with this number in Pillow's `Resampling`, which is `resample` in preprocessor configurations.
    pub(super) fn numbered(number: u32) -> Option<Filter> {
        Some(match number {
            1 => Filter::Lanczos,
            2 => Filter::Bilinear,
            3 => Filter::Bicubic,
            _ => return None,
        })
    }

    /// Pixels on each side of the centre.
    fn support(self) -> f64 {
        match self {
            Filter::Bilinear => 1.0,
            Filter::Bicubic => 2.0,
            Filter::Lanczos => 3.0,
        }
    }

    /// The weight at this distance.
    fn at(self, x: f64) -> f64 {
        let distance = x.abs();
        match self {
            Filter::Bilinear => (1.0 - distance).max(0.0),
            Filter::Bicubic if distance < 1.0 => (1.5 * distance - 2.5) * distance * distance + 1.0,
            Filter::Bicubic if distance < 2.0 => (((distance - 5.0) * distance + 8.0) * distance - 4.0) * -0.5,
            Filter::Lanczos if (-3.0..3.0).contains(&x) => sinc(x) * sinc(x / 3.0),
            Filter::Bicubic | Filter::Lanczos => 0.0,
        }
    }
}

fn sinc(x: f64) -> f64 {
    let angle = x * std::f64::consts::PI;
    if x == 0.0 { 1.0 } else { angle.sin() / angle }
}

/// The sources of some outputs along an axis.
struct Axis {
    /// For each output, its first source and where its weights are.
    spans: Vec<(usize, Range<usize>)>,
    weights: Vec<i32>,
}

impl Axis {
    /// The outputs `window` of an axis of `from` pixels that becomes one of `to`.
    fn new(from: u32, to: u32, window: Range<u32>, filter: Filter) -> Axis {
        let scale = f64::from(from) / f64::from(to);
        let widening = scale.max(1.0);
        let support = filter.support() * widening;
        let mut axis = Axis { spans: Vec::with_capacity(window.len()), weights: Vec::new() };
        let mut exact = Vec::new();
        for output in window {
            let centre = (f64::from(output) + 0.5) * scale;
            // Casts of floats stop at 0, as Pillow's bounds do.
            let first = (centre - support + 0.5) as u32;
            let end = ((centre + support + 0.5) as u32).min(from);
            let place = |source: u32| (f64::from(source) - centre + 0.5) * (1.0 / widening);
            exact.clear();
            exact.extend((first..end).map(|source| filter.at(place(source))));
            let sum: f64 = exact.iter().sum();
            let begin = axis.weights.len();
            axis.weights.extend(exact.iter().map(|&weight| fixed(if sum == 0.0 { weight } else { weight / sum })));
            axis.spans.push((first as usize, begin..axis.weights.len()));
        }
        axis
    }

    /// For each output, its first source and the weights from there on.
    fn spans(&self) -> impl Iterator<Item = (usize, &[i32])> {
        self.spans.iter().map(|(first, weights)| (*first, &self.weights[weights.clone()]))
    }

    /// All sources that any output uses.
    fn sources(&self) -> Range<usize> {
        let first = self.spans.iter().map(|(first, _)| *first).min().unwrap_or(0);
        let end = self.spans.iter().map(|(first, weights)| first + weights.len()).max().unwrap_or(0);
        first..end
    }
}

/// Rounded to [`BITS`], halves away from zero.
fn fixed(weight: f64) -> i32 {
    let scaled = weight * f64::from(1 << BITS);
    (if weight < 0.0 { scaled - 0.5 } else { scaled + 0.5 }) as i32
}

fn clipped(sum: i32) -> u8 {
    (sum >> BITS).clamp(0, 255) as u8
}

/// A row of pixels, resized along it.
fn resize_row(row: &[[u8; 3]], axis: &Axis, out: &mut [[u8; 3]]) {
    for (out, (first, weights)) in out.iter_mut().zip(axis.spans()) {
        let mut sums = [HALF; 3];
        for (pixel, &weight) in row[first..].iter().zip(weights) {
            for (sum, &value) in sums.iter_mut().zip(pixel) {
                *sum += i32::from(value) * weight;
            }
        }
        *out = sums.map(clipped);
    }
}

/// Rows of `width` pixels, of which `rows` begins with number `first_row`, resized across them.
fn resize_columns(rows: &[u8], width: usize, first_row: usize, axis: &Axis) -> Vec<u8> {
    let mut out = Vec::with_capacity(axis.spans.len() * width * 3);
    let mut sums = vec![HALF; width * 3];
    for (first, weights) in axis.spans() {
        sums.fill(HALF);
        for (row, &weight) in rows[(first - first_row) * width * 3..].chunks_exact(width * 3).zip(weights) {
            for (sum, &value) in sums.iter_mut().zip(row) {
                *sum += i32::from(value) * weight;
            }
        }
        out.extend(sums.iter().map(|&sum| clipped(sum)));
    }
    out
}

impl Picture {
    /// The picture in another size, equal to Pillow's `Image.resize` bit by bit.
    ///
    /// # Errors
    /// [`Error::Operand`] if a side is zero or above 65536, also of this picture, or the size or the step between rows and
    /// columns has over [`MAX_PIXELS`].
    pub fn resize(&self, width: u32, height: u32, filter: Filter) -> Result<Picture, Error> {
        self.resize_window([width, height], [0..width, 0..height], filter)
    }

    /// A part, columns and rows `window`, of the picture in the size `[width, height]`.
    ///
    /// # Errors
    /// As [`Picture::resize`], of the window's size; also if the window is not inside the size.
    pub(super) fn resize_window(
        &self,
        size: [u32; 2],
        window: [Range<u32>; 2],
        filter: Filter,
    ) -> Result<Picture, Error> {
        let [columns, rows] = window;
        let is_inside = |window: &Range<u32>, size| window.start < window.end && window.end <= size;
        if !is_inside(&columns, size[0]) || !is_inside(&rows, size[1]) {
            return Err(refused(size, "a window inside the size, and neither empty".into()));
        }
        // Weights are as many as pixels along a side.
        if self.width.max(self.height) > MAX_SIDE {
            let expected = format!("a picture with sides of at most {MAX_SIDE}");
            return Err(refused([self.width, self.height], expected));
        }
        let (width, height) = (columns.end - columns.start, rows.end - rows.start);
        if width.max(height) > MAX_SIDE {
            return Err(refused(size, format!("sides of at most {MAX_SIDE}")));
        }
        let down = Axis::new(self.height, size[1], rows, filter);
        let used = down.sources();
        let is_too_large = |height: usize| u64::from(width) * height as u64 > MAX_PIXELS;
        if is_too_large(height as usize) || is_too_large(used.len()) {
            return Err(refused(size, format!("at most {MAX_PIXELS} pixels, also with only its width changed")));
        }
        let across = Axis::new(self.width, size[0], columns, filter);
        let mut resized = vec![0; width as usize * used.len() * 3];
        let source = self.rgb.chunks_exact(self.width as usize * 3).skip(used.start);
        for (row, out) in source.zip(resized.chunks_exact_mut(width as usize * 3)) {
            resize_row(row.as_chunks().0, &across, out.as_chunks_mut().0);
        }
        let rgb = resize_columns(&resized, width as usize, used.start, &down);
        Ok(Picture { width, height, rgb })
    }
}

fn refused(size: [u32; 2], expected: String) -> Error {
    let found = format!("{} x {}", size[0], size[1]);
    Error::Operand { kernel: "resize", operand: "size", expected, found }
}
