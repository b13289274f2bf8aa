//! The sizes that a picture is resized to, and the tiles it is cut into.
//!
//! Rules: `image_processing_*.py` of transformers 5.24. Their roundings (of halves to even, of floats down) decide the
//! number of rows, so they are kept.

use std::ops::Range;

use super::{MAX_PIXELS, Preprocess};
use crate::error::Error;

/// How often the longer side of a picture can hold the shorter one, in Qwen's processor.
const MAX_ASPECT: u32 = 200;
/// A side that Idefics3's processor resizes no picture beyond.
const MAX_IDEFICS_SIDE: u32 = 4096;

/// How a picture gets the size that an encoder takes.
#[derive(Clone, Debug, PartialEq)]
pub enum Fit {
    /// Sides are rounded to merge blocks, then scaled so that their product is in a range: Qwen, LFM3-VL.
    Pixels {
        /// The least.
        min: u64,
        /// The most.
        max: u64,
    },
    /// The largest size of this aspect ratio with at most this many merge blocks: Gemma 4.
    Blocks {
        /// The most.
        max: u32,
    },
    /// The largest size of this aspect ratio with at most this many patches: SigLIP 2.
    Patches {
        /// The most.
        max: u32,
    },
    /// One size for all, whatever the aspect ratio: Gemma 3, SigLIP.
    Stretch {
        /// Width and height.
        size: [u32; 2],
    },
    /// The shorter side gets this length, and the middle is cut out: CLIP.
    Crop {
        /// The shorter side.
        shortest: u32,
        /// Width and height of the part.
        size: [u32; 2],
    },
    /// A picture above some size is cut into square tiles, with the whole after them: LFM2-VL.
    Tiles {
        /// The least and the most merge blocks of a whole picture.
        blocks: [u32; 2],
        /// The least and the most tiles.
        tiles: [u32; 2],
        /// The side of a tile.
        side: u32,
        /// A picture is cut if it has more than this times the most blocks.
        tolerance: f64,
        /// Whether the whole follows the tiles.
        whole: bool,
    },
    /// The longer side gets this length, and the picture is cut into square tiles, with the whole after them: SmolVLM.
    Split {
        /// The longer side.
        longest: u32,
        /// The side of a tile.
        side: u32,
        /// Whether it is cut, or squeezed into one tile.
        is_cut: bool,
    },
}

/// The tiles of a picture, in the order of the text: row by row, then the whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Rows of tiles, 0 for a picture that is not cut.
    pub rows: u32,
    /// Tiles in each row, 0 for a picture that is not cut.
    pub columns: u32,
    /// For each tile, the rows that it gives in the text. There is one tile more than `rows * columns` if the whole
    /// picture follows or is alone.
    pub tile_rows: Vec<u32>,
}

impl Layout {
    /// Rows of the picture in the text, without the tokens around them.
    pub fn n_rows(&self) -> u32 {
        self.tile_rows.iter().sum()
    }
}

/// One resize.
#[derive(Clone, Debug)]
pub(super) struct Step {
    /// The step whose result is resized, or the picture itself.
    pub from: Option<usize>,
    pub size: [u32; 2],
    /// The part that is kept.
    pub window: [Range<u32>; 2],
}

impl Step {
    fn whole(from: Option<usize>, size: [u32; 2]) -> Step {
        Step { from, size, window: size.map(|side| 0..side) }
    }
}

/// A tile: a part of the result of a step.
#[derive(Clone, Debug)]
pub(super) struct Tile {
    pub step: usize,
    /// Left and top.
    pub origin: [u32; 2],
    /// Rows and columns of patches.
    pub grid: [u32; 2],
}

/// What happens to a picture of some size.
#[derive(Clone, Debug)]
pub(super) struct Plan {
    pub steps: Vec<Step>,
    pub tiles: Vec<Tile>,
    /// Rows and columns of tiles.
    pub cut: [u32; 2],
}

impl Preprocess {
    /// The tiles and numbers of rows of a picture of this size, without its pixels.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a size that the family refuses, such as one that is too elongated.
    pub fn layout(&self, width: u32, height: u32) -> Result<Layout, Error> {
        Ok(self.layout_of(&self.plan(width, height)?))
    }

    pub(super) fn layout_of(&self, plan: &Plan) -> Layout {
        let n_rows = |tile: &Tile| tile.grid[0] * tile.grid[1] / (self.merge * self.merge);
        let [rows, columns] = plan.cut;
        Layout { rows, columns, tile_rows: plan.tiles.iter().map(n_rows).collect() }
    }

    /// Steps and tiles for a picture of this size.
    pub(super) fn plan(&self, width: u32, height: u32) -> Result<Plan, Error> {
        let size = [width, height];
        let refused = |expected: String| {
            let (format, field) = ("picture", "its size for this model".into());
            Err(Error::Unsupported { format, field, found: format!("{width} x {height}"), supported: expected })
        };
        if width == 0 || height == 0 {
            return refused("sides above 0".into());
        }
        let block = self.patch * self.merge;
        let plan = match self.fit {
            Fit::Pixels { min, max } => match is_elongated(size) {
                true => return refused(format!("sides up to {MAX_ASPECT} times as long as each other")),
                false => self.alone(Step::whole(None, fit_pixels(size, block, min, max, 0))),
            },
            Fit::Blocks { max } => match fit_blocks(size, block, max) {
                Some(fitted) => self.alone(Step::whole(None, fitted)),
                None => return refused(format!("what fits into {max} squares")),
            },
            Fit::Patches { max } => self.alone(Step::whole(None, fit_patches(size, self.patch, max))),
            Fit::Stretch { size } => self.alone(Step::whole(None, size)),
            Fit::Crop { shortest, size: part } => self.alone(cropped(size, shortest, part)),
            Fit::Tiles { blocks, tiles, side, tolerance, whole } => {
                let is_cut = tiles[1] > 1 && self.is_large(size, blocks[1], tolerance);
                self.tiled(size, blocks, is_cut.then(|| closest_grid(size, tiles, side)), side, whole)
            }
            Fit::Split { longest, side, is_cut } => self.split(size, longest, side, is_cut),
        };
        let n_pixels =
            |step: &Step| step.window.iter().map(|window| u64::from(window.end - window.start)).product::<u64>();
        match plan.steps.iter().any(|step| n_pixels(step) > MAX_PIXELS) {
            true => refused(format!("what has at most {MAX_PIXELS} pixels when it is resized")),
            false => Ok(plan),
        }
    }

    /// A picture that is not cut.
    fn alone(&self, step: Step) -> Plan {
        let tile = Tile { step: 0, origin: [0, 0], grid: self.grid_of(&step.window) };
        Plan { steps: vec![step], tiles: vec![tile], cut: [0, 0] }
    }

    /// Rows and columns of patches.
    fn grid_of(&self, [columns, rows]: &[Range<u32>; 2]) -> [u32; 2] {
        [(rows.end - rows.start) / self.patch, (columns.end - columns.start) / self.patch]
    }

    /// Whether LFM2-VL cuts a picture.
    fn is_large(&self, size: [u32; 2], max_blocks: u32, tolerance: f64) -> bool {
        let block = f64::from(self.patch * self.merge);
        let [width, height] = size.map(|length| f64::from(self.patch).max(rounded(length, self.patch * self.merge)));
        width * height > f64::from(max_blocks) * block * block * tolerance
    }

    /// LFM2-VL: the whole, or columns and rows of tiles and the whole.
    fn tiled(&self, size: [u32; 2], blocks: [u32; 2], cut: Option<[u32; 2]>, side: u32, whole: bool) -> Plan {
        let block = self.patch * self.merge;
        let [min, max] = blocks.map(|n| u64::from(n) * u64::from(block) * u64::from(block));
        let fitted = Step::whole(None, fit_pixels(size, block, min, max, block));
        let Some([columns, rows]) = cut else { return self.alone(fitted) };
        let mut steps = vec![Step::whole(None, [columns * side, rows * side])];
        let mut tiles = self.cut(0, [columns, rows], side);
        if whole {
            tiles.push(Tile { step: 1, origin: [0, 0], grid: self.grid_of(&fitted.window) });
            steps.push(fitted);
        }
        Plan { steps, tiles, cut: [rows, columns] }
    }

    /// SmolVLM: to the longest side, then to whole tiles. The last tile is all of them made smaller.
    fn split(&self, size: [u32; 2], longest: u32, side: u32, is_cut: bool) -> Plan {
        let long = fit_longest(size, longest);
        let tiled = if is_cut { whole_tiles(long, side) } else { [side, side] };
        let mut steps = vec![Step::whole(None, long), Step::whole(Some(0), tiled)];
        let [columns, rows] = tiled.map(|length| length / side);
        if [columns, rows] == [1, 1] {
            return Plan { steps, tiles: self.cut(1, [1, 1], side), cut: [0, 0] };
        }
        let mut tiles = self.cut(1, [columns, rows], side);
        steps.push(Step::whole(Some(1), [side, side]));
        tiles.extend(self.cut(2, [1, 1], side));
        Plan { steps, tiles, cut: [rows, columns] }
    }

    /// Square tiles, row by row.
    fn cut(&self, step: usize, [columns, rows]: [u32; 2], side: u32) -> Vec<Tile> {
        let places = (0..rows).flat_map(|row| (0..columns).map(move |column| [column * side, row * side]));
        places.map(|origin| Tile { step, origin, grid: [side / self.patch; 2] }).collect()
    }
}

fn is_elongated([width, height]: [u32; 2]) -> bool {
    f64::from(width.max(height)) / f64::from(width.min(height)) > f64::from(MAX_ASPECT)
}

/// `length` rounded to a multiple of `unit`, halves to the even one.
fn rounded(length: u32, unit: u32) -> f64 {
    (f64::from(length) / f64::from(unit)).round_ties_even() * f64::from(unit)
}

/// Multiples of `unit`, at least `least`, whose product is in the range.
fn fit_pixels(size: [u32; 2], unit: u32, min: u64, max: u64, least: u32) -> [u32; 2] {
    let near = size.map(|length| rounded(length, unit).max(f64::from(least)));
    let n_pixels = f64::from(size[0]) * f64::from(size[1]);
    let unit = f64::from(unit);
    let fitted = if near[0] * near[1] > max as f64 {
        let beta = (n_pixels / max as f64).sqrt();
        size.map(|length| ((f64::from(length) / beta / unit).floor() * unit).max(unit))
    } else if near[0] * near[1] < min as f64 {
        let beta = (min as f64 / n_pixels).sqrt();
        size.map(|length| (f64::from(length) * beta / unit).ceil() * unit)
    } else {
        near
    };
    fitted.map(|length| length as u32)
}

/// Multiples of `unit` of this aspect ratio whose product is at most `max` units, or `None` if not even one fits.
fn fit_blocks(size: [u32; 2], unit: u32, max: u32) -> Option<[u32; 2]> {
    let side = f64::from(unit);
    let most = f64::from(max) * side * side;
    let factor = (most / (f64::from(size[0]) * f64::from(size[1]))).sqrt();
    let n = size.map(|length| (factor * f64::from(length) / side).floor() as u32);
    let n = match (n, size) {
        ([0, 0], _) => return None,
        ([0, _], [width, height]) => [1, (height / width).min(max)],
        ([_, 0], [width, height]) => [(width / height).min(max), 1],
        _ => n,
    };
    (u64::from(n[0]) * u64::from(n[1]) <= u64::from(max)).then_some(n.map(|n| n * unit))
}

/// Multiples of `patch`, rounded up, with at most `max` patches: the scale by halving an interval.
fn fit_patches(size: [u32; 2], patch: u32, max: u32) -> [u32; 2] {
    const STEP: f64 = 1e-5;
    let n_at = |scale: f64| size.map(|length| (f64::from(length) * scale / f64::from(patch)).ceil().max(1.0));
    let (mut low, mut high) = (STEP / 10.0, 100.0);
    while high - low >= STEP {
        let middle = (low + high) / 2.0;
        let [columns, rows] = n_at(middle);
        *(if columns * rows <= f64::from(max) { &mut low } else { &mut high }) = middle;
    }
    n_at(low).map(|n| n as u32 * patch)
}

/// The shorter side as given, the other rounded down, and the middle of it.
fn cropped([width, height]: [u32; 2], shortest: u32, part: [u32; 2]) -> Step {
    let scaled = |long: u32, short: u32| {
        let length = u64::from(shortest) * u64::from(long) / u64::from(short);
        u32::try_from(length).unwrap_or(u32::MAX)
    };
    let size = match width <= height {
        true => [shortest, scaled(height, width)],
        false => [scaled(width, height), shortest],
    };
    let middle = |axis: usize| {
        let begin = (size[axis] - part[axis].min(size[axis])) / 2;
        begin..begin + part[axis]
    };
    Step { from: None, size, window: [middle(0), middle(1)] }
}

/// The longer side as given, the other by the aspect ratio, rounded down.
fn with_longer([width, height]: [u32; 2], longer: u32) -> [u32; 2] {
    let aspect = f64::from(width) / f64::from(height);
    match width >= height {
        true => [longer, (f64::from(longer) / aspect) as u32],
        false => [(f64::from(longer) * aspect) as u32, longer],
    }
}

/// The longer side as given, the other even, and neither above [`MAX_IDEFICS_SIDE`].
fn fit_longest(size: [u32; 2], longest: u32) -> [u32; 2] {
    let mut fitted = with_longer(size, longest);
    let shorter = usize::from(size[0] >= size[1]);
    fitted[shorter] = fitted[shorter].next_multiple_of(2).max(1);
    match longest > MAX_IDEFICS_SIDE {
        true => with_longer(fitted, MAX_IDEFICS_SIDE).map(|length| length.max(1)),
        false => fitted,
    }
}

/// Rounded up to whole tiles, the longer side first and the other by the aspect ratio.
fn whole_tiles(size: [u32; 2], side: u32) -> [u32; 2] {
    let longer = size[0].max(size[1]).next_multiple_of(side);
    with_longer(size, longer).map(|length| length.next_multiple_of(side))
}

/// Columns and rows of tiles, between the least and the most, with the closest aspect ratio; of equal ones the first,
/// or a larger one if the picture has over half of its pixels.
fn closest_grid([width, height]: [u32; 2], [least, most]: [u32; 2], side: u32) -> [u32; 2] {
    let aspect = f64::from(width) / f64::from(height);
    let n_pixels = f64::from(width) * f64::from(height);
    let mut grids: Vec<[u32; 2]> =
        (1..=most).flat_map(|columns| (1..=most / columns).map(move |n| [columns, n])).collect();
    grids.retain(|[columns, rows]| columns * rows >= least);
    grids.sort_by_key(|[columns, rows]| (columns * rows, *columns));
    let mut best = ([1, 1], f64::INFINITY);
    for grid @ [columns, rows] in grids {
        let difference = (aspect - f64::from(columns) / f64::from(rows)).abs();
        let tile_pixels = f64::from(side) * f64::from(side) * f64::from(columns * rows);
        if difference < best.1 || (difference == best.1 && n_pixels > 0.5 * tile_pixels) {
            best = (grid, difference);
        }
    }
    best.0
}
