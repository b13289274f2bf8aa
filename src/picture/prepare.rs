//! From a picture to the patches that a vision encoder takes.

use super::Picture;
use super::fit::{Layout, Tile};
use super::preprocess::{PixelOrder, Preprocess};
use crate::error::Error;

/// A tile of a picture as an encoder takes it.
#[derive(Clone, Debug, PartialEq)]
pub struct Patches {
    /// `[n, patch_dim]`, normalised: rows for the product with the patch embedding. Within a patch by
    /// [`PixelOrder`].
    pub values: Vec<f32>,
    /// Values of a patch: `3 * patch * patch`.
    pub patch_dim: u32,
    /// Rows and columns of patches.
    pub grid: [u32; 2],
    /// The row and the column of each patch, in the order of `values`.
    pub places: Vec<[u32; 2]>,
}

/// A picture as an encoder takes it.
#[derive(Clone, Debug, PartialEq)]
pub struct Prepared {
    /// Its tiles, in the order of the text.
    pub tiles: Vec<Patches>,
    /// How they are arranged.
    pub layout: Layout,
}

impl Preprocess {
    /// Resizes, cuts and normalises a picture.
    ///
    /// # Errors
    /// As [`Preprocess::layout`]; [`Error::Operand`] if a step would need too much memory.
    pub fn prepare(&self, picture: &Picture) -> Result<Prepared, Error> {
        let plan = self.plan(picture.width, picture.height)?;
        let mut resized: Vec<Picture> = Vec::with_capacity(plan.steps.len());
        for step in &plan.steps {
            let from = step.from.and_then(|step| resized.get(step)).unwrap_or(picture);
            resized.push(from.resize_window(step.size, step.window.clone(), self.filter)?);
        }
        let levels = self.levels();
        let tiles = plan.tiles.iter().map(|tile| self.cut_patches(&resized[tile.step], tile, &levels)).collect();
        Ok(Prepared { tiles, layout: self.layout_of(&plan) })
    }

    /// The value of each level of each channel, rounded as torchvision does.
    fn levels(&self) -> [[f32; 256]; 3] {
        std::array::from_fn(|channel| {
            let [mean, std] = [self.mean[channel], self.std[channel]].map(|value| value * 255.0);
            std::array::from_fn(|level| (level as f32 - mean) / std)
        })
    }

    fn cut_patches(&self, picture: &Picture, tile: &Tile, levels: &[[f32; 256]; 3]) -> Patches {
        let side = self.patch as usize;
        let patch_dim = 3 * side * side;
        let places = merge_order(tile.grid, self.merge);
        let mut values = vec![0.0; places.len() * patch_dim];
        let (pixels, _) = picture.rgb.as_chunks::<3>();
        for (patch, [row, column]) in values.chunks_exact_mut(patch_dim).zip(&places) {
            let [left, top] = [tile.origin[0] + column * self.patch, tile.origin[1] + row * self.patch];
            let rows = pixels.chunks_exact(picture.width as usize).skip(top as usize).take(side);
            let pixels = rows.flat_map(|row| row.iter().skip(left as usize).take(side));
            for (at, pixel) in pixels.enumerate() {
                for (channel, (&level, levels)) in pixel.iter().zip(levels).enumerate() {
                    let to = match self.order {
                        PixelOrder::ChannelFirst => channel * side * side + at,
                        PixelOrder::ChannelLast => at * 3 + channel,
                    };
                    patch[to] = levels[usize::from(level)];
                }
            }
        }
        Patches { values, patch_dim: patch_dim as u32, grid: tile.grid, places }
    }
}

/// The row and column of each patch of a grid in merge-block order.
pub(super) fn merge_order([rows, columns]: [u32; 2], merge: u32) -> Vec<[u32; 2]> {
    let square =
        move |rows: u32, columns: u32| (0..rows).flat_map(move |row| (0..columns).map(move |column| [row, column]));
    let blocks = square(rows / merge, columns / merge);
    let place = move |[row, column]: [u32; 2]| {
        square(merge, merge)
            .map(move |[inner_row, inner_column]| [row * merge + inner_row, column * merge + inner_column])
    };
    blocks.flat_map(place).collect()
}
