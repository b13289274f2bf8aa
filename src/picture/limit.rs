//! How large a picture becomes at most.

use super::{Fit, Preprocess};
use crate::error::Error;

impl Preprocess {
    /// With pictures made small enough for so many rows in a text, where the family has no size of its own.
    ///
    /// # Errors
    /// [`Error::Option`] for no rows at all.
    pub fn limited_to(mut self, max_rows: u32) -> Result<Preprocess, Error> {
        if max_rows == 0 {
            return Err(Error::Option { option: "max_rows", expected: "1 or more".into(), found: "0".into() });
        }
        match &mut self.fit {
            Fit::Pixels { min, max } => {
                let block = u64::from(self.patch) * u64::from(self.merge);
                *max = (*max).min(u64::from(max_rows).saturating_mul(block * block));
                *min = (*min).min(*max);
            }
            Fit::Blocks { max } => *max = (*max).min(max_rows),
            Fit::Patches { .. } | Fit::Stretch { .. } | Fit::Crop { .. } | Fit::Tiles { .. } | Fit::Split { .. } => {}
        }
        Ok(self)
    }

    /// Patches of a tile at most.
    pub fn max_patches(&self) -> u32 {
        let (patch, block) = (u64::from(self.patch.max(1)), u64::from(self.merge) * u64::from(self.merge));
        let of_side = |side: u32| u64::from(side) / patch;
        let n = match self.fit {
            Fit::Pixels { max, .. } => max / (patch * patch),
            Fit::Blocks { max } => u64::from(max) * block,
            Fit::Patches { max } => max.into(),
            Fit::Stretch { size } | Fit::Crop { size, .. } => of_side(size[0]) * of_side(size[1]),
            Fit::Tiles { blocks, side, .. } => (u64::from(blocks[1]) * block).max(of_side(side).pow(2)),
            Fit::Split { side, .. } => of_side(side).pow(2),
        };
        u32::try_from(n).unwrap_or(u32::MAX)
    }
}
