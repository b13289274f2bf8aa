//! How a model wants its pictures, read from its files: `preprocessor_config.json` or `processor_config.json` with
//! `config.json`, or the metadata of an mmproj GGUF file.

use std::ops::RangeInclusive;

use serde_json::Value;

use super::{Family, Filter, Fit, MAX_PIXELS};
use crate::error::Error;

/// Limits of settings, far above any model's, so that sizes made of them fit into 32 bits.
const SIDES: RangeInclusive<f64> = 1.0..=8192.0;
const PATCHES: RangeInclusive<f64> = 1.0..=128.0;
const MERGES: RangeInclusive<f64> = 1.0..=16.0;
const COUNTS: RangeInclusive<f64> = 1.0..=65_536.0;
const TILES: RangeInclusive<f64> = 1.0..=64.0;
const PIXELS: RangeInclusive<f64> = 1.0..=MAX_PIXELS as f64;
/// The least and the most blocks of a picture where a GGUF file has no range of pixels: those of llama.cpp for Qwen.
const GGUF_QWEN_BLOCKS: [u64; 2] = [8, 4096];

/// The order of the values of a patch, which is that of its weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PixelOrder {
    /// Channel, row, column: a convolution's, and all GGUF files'.
    ChannelFirst,
    /// Row, column, channel.
    ChannelLast,
}

/// How a model wants its pictures.
#[derive(Clone, Debug, PartialEq)]
pub struct Preprocess {
    /// Which says what stands for a picture in the text.
    pub family: Family,
    /// Pixels on a side of a patch.
    pub patch: u32,
    /// Patches on a side of a merge block, of which the encoder makes one row of the text.
    pub merge: u32,
    /// The filter of resizes.
    pub filter: Filter,
    /// Mean of each channel, where white is 1.
    pub mean: [f32; 3],
    /// Standard deviation of each channel.
    pub std: [f32; 3],
    /// The order of values in a patch.
    pub order: PixelOrder,
    /// Sizes and tiles.
    pub fit: Fit,
}

/// A setting: its names in the JSON files, of which the first there is counts, and in GGUF files. A JSON name that
/// begins with `config.` is in `config.json`, others are in the preprocessor's file.
struct Key(&'static [&'static str], &'static str);

const PATCH: Key = Key(&["encoder_patch_size", "patch_size", "config.vision_config.patch_size"], "patch_size");
const MERGE: Key = Key(
    &["merge_size", "pooling_kernel_size", "downsample_factor", "config.scale_factor", "config.downsample_factor"],
    "spatial_merge_size|projector.scale_factor",
);
const MEAN: Key = Key(&["image_mean"], "image_mean");
const STD: Key = Key(&["image_std"], "image_std");
const FILTER: Key = Key(&["resample"], "");
const MIN_PIXELS: Key = Key(&["min_pixels", "size.shortest_edge"], "image_min_pixels");
const MAX_PIXELS_KEY: Key = Key(&["max_pixels", "size.longest_edge"], "image_max_pixels");
const MAX_BLOCKS: Key = Key(&["max_soft_tokens"], "");
const MAX_PATCHES: Key = Key(&["max_num_patches"], "");
const WIDTH: Key = Key(&["size.width", "size"], "image_size");
const HEIGHT: Key = Key(&["size.height", "size"], "image_size");
const SHORTEST: Key = Key(&["size.shortest_edge", "size"], "image_size");
const CROP_WIDTH: Key = Key(&["crop_size.width", "crop_size"], "image_size");
const CROP_HEIGHT: Key = Key(&["crop_size.height", "crop_size"], "image_size");
const LEAST_BLOCKS: Key = Key(&["min_image_tokens"], "");
const MOST_BLOCKS: Key = Key(&["max_image_tokens"], "");
const LEAST_TILES: Key = Key(&["min_tiles"], "");
const MOST_TILES: Key = Key(&["max_tiles"], "");
const TILE: Key = Key(&["tile_size"], "");
const TOLERANCE: Key = Key(&["max_pixels_tolerance"], "");
const LONGEST: Key = Key(&["size.longest_edge"], "preproc_image_size");
const SPLIT_TILE: Key = Key(&["max_image_size.longest_edge"], "image_size");
const ROWS: Key = Key(&["config.mm_tokens_per_image"], "");
const SCALE: Key = Key(&["rescale_factor"], "");
/// Steps that a preprocessor's file can turn off or on, what they are here, and the family that they are for, if not
/// for all.
const STEPS: [(&str, bool, Option<Family>); 4] = [
    ("do_resize", true, None),
    ("do_rescale", true, None),
    ("do_pan_and_scan", false, Some(Family::Gemma3)),
    ("do_center_crop", true, Some(Family::Clip)),
];

impl Family {
    /// Settings of published models, for those that a file leaves out.
    fn defaults(self) -> Preprocess {
        use PixelOrder::{ChannelFirst, ChannelLast};
        let half = [0.5; 3];
        let base = |patch, merge, filter, order, fit| Preprocess {
            family: self,
            patch,
            merge,
            filter,
            mean: half,
            std: half,
            order,
            fit,
        };
        match self {
            Family::Qwen3Vl | Family::Lfm3Vl => {
                let fit = Fit::Pixels { min: 65_536, max: 16_777_216 };
                base(16, 2, Filter::Bicubic, ChannelFirst, fit)
            }
            Family::Gemma4 => base(16, 3, Filter::Bicubic, ChannelLast, Fit::Blocks { max: 280 }),
            Family::Gemma4Unified => base(48, 1, Filter::Bicubic, ChannelLast, Fit::Blocks { max: 280 }),
            Family::Lfm2Vl => {
                let (blocks, tiles) = ([64, 256], [2, 10]);
                let fit = Fit::Tiles { blocks, tiles, side: 512, tolerance: 2.0, whole: true };
                base(16, 2, Filter::Bilinear, ChannelLast, fit)
            }
            Family::SmolVlm => {
                let fit = Fit::Split { longest: 2048, side: 512, is_cut: true };
                base(16, 4, Filter::Lanczos, ChannelFirst, fit)
            }
            Family::Gemma3 => base(14, 4, Filter::Bilinear, ChannelFirst, Fit::Stretch { size: [896, 896] }),
            Family::Clip => Preprocess {
                mean: [0.481_454_66, 0.457_827_5, 0.408_210_73],
                std: [0.268_629_54, 0.261_302_6, 0.275_777_1],
                ..base(32, 1, Filter::Bicubic, ChannelFirst, Fit::Crop { shortest: 224, size: [224, 224] })
            },
            Family::Siglip => base(16, 1, Filter::Bicubic, ChannelFirst, Fit::Stretch { size: [224, 224] }),
            Family::Siglip2 => base(16, 1, Filter::Bilinear, ChannelLast, Fit::Patches { max: 256 }),
        }
    }
}

impl Preprocess {
    /// From a model folder: `preprocessor_config.json` (or `processor_config.json`, which has the same inside), and
    /// `config.json`. Missing settings are those of transformers.
    ///
    /// # Errors
    /// [`Error::Config`] for a setting out of range or of the wrong type, [`Error::Unsupported`] for a filter or step
    /// that is not done here; each names its key.
    pub fn from_json(family: Family, preprocessor: &Value, config: &Value) -> Result<Preprocess, Error> {
        let preprocessor = preprocessor.get("image_processor").unwrap_or(preprocessor);
        let find = |name: &str| {
            let (file, name) = match name.strip_prefix("config.") {
                Some(name) => (config, name),
                None => (preprocessor, name),
            };
            name.split('.').try_fold(file, |value, name| value.get(name)).filter(|value| !value.is_null()).cloned()
        };
        let keys = Keys { find: &find, is_gguf: false };
        for (step, wanted, _) in STEPS.iter().filter(|(.., of)| of.is_none_or(|of| of == family)) {
            if find(step) == Some(Value::Bool(!wanted)) {
                return Err(unsupported(step, (!wanted).to_string(), &wanted.to_string()));
            }
        }
        match keys.number(&SCALE, 0.0..=1.0)? {
            Some(scale) if (scale * 255.0 - 1.0).abs() > 1e-4 => {
                Err(unsupported("rescale_factor", scale.to_string(), "1 / 255"))
            }
            _ => keys.read(family),
        }
    }

    /// From an mmproj GGUF file, by its keys without `clip.vision.`: numbers, and lists of numbers. Missing settings
    /// are those of llama.cpp or, where it has none, of transformers.
    ///
    /// # Errors
    /// As [`Preprocess::from_json`].
    pub fn from_gguf(family: Family, find: &dyn Fn(&str) -> Option<Value>) -> Result<Preprocess, Error> {
        Keys { find, is_gguf: true }.read(family)
    }
}

/// The settings of a file.
struct Keys<'a> {
    find: &'a dyn Fn(&str) -> Option<Value>,
    is_gguf: bool,
}

impl Keys<'_> {
    fn read(&self, family: Family) -> Result<Preprocess, Error> {
        let mut preprocess = family.defaults();
        preprocess.patch = self.whole(&PATCH, PATCHES, preprocess.patch)?;
        preprocess.merge = self.whole(&MERGE, MERGES, preprocess.merge)?;
        if family == Family::Gemma4Unified {
            // The files have the tower's patches and how many of them are one here.
            let patch = self.whole(&PATCH, PATCHES, 16)? * self.whole(&MERGE, MERGES, 3)?;
            (preprocess.patch, preprocess.merge) = (patch, 1);
        }
        if self.is_gguf {
            preprocess.order = PixelOrder::ChannelFirst;
        }
        self.read_levels(&mut preprocess)?;
        if let Some((name, value)) = self.value(&FILTER) {
            let filter = value.as_u64().and_then(|number| Filter::numbered(u32::try_from(number).ok()?));
            let supported = "1 (Lanczos), 2 (bilinear) or 3 (bicubic)";
            preprocess.filter = filter.ok_or_else(|| unsupported(name, value.to_string(), supported))?;
        }
        preprocess.fit = self.read_fit(&preprocess)?;
        self.read_pooling(&mut preprocess)?;
        preprocess.check()
    }

    /// Mean and deviation. Those of Gemma 4 are in its code: its tower takes values from -1 to 1, and without the tower
    /// they are from 0 to 1.
    fn read_levels(&self, preprocess: &mut Preprocess) -> Result<(), Error> {
        match preprocess.family {
            Family::Gemma4 => {}
            Family::Gemma4Unified => (preprocess.mean, preprocess.std) = ([0.0; 3], [1.0; 3]),
            _ if (self.find)("do_normalize") == Some(Value::Bool(false)) => {
                (preprocess.mean, preprocess.std) = ([0.0; 3], [1.0; 3]);
            }
            _ => {
                preprocess.mean = self.channels(&MEAN, -1e3..=1e3, preprocess.mean)?;
                preprocess.std = self.channels(&STD, 1e-3..=1e3, preprocess.std)?;
            }
        }
        Ok(())
    }

    fn read_fit(&self, preprocess: &Preprocess) -> Result<Fit, Error> {
        Ok(match preprocess.fit {
            Fit::Pixels { min, max } => {
                let block = u64::from(preprocess.patch * preprocess.merge).pow(2);
                let [min, max] = if self.is_gguf { GGUF_QWEN_BLOCKS.map(|n| n * block) } else { [min, max] };
                let min = self.number(&MIN_PIXELS, PIXELS)?.map_or(min, |min| min as u64);
                Fit::Pixels { min, max: self.number(&MAX_PIXELS_KEY, PIXELS)?.map_or(max, |max| max as u64) }
            }
            Fit::Blocks { max } => Fit::Blocks { max: self.whole(&MAX_BLOCKS, COUNTS, max)? },
            Fit::Patches { max } => Fit::Patches { max: self.whole(&MAX_PATCHES, COUNTS, max)? },
            Fit::Stretch { size: [width, height] } => {
                Fit::Stretch { size: [self.whole(&WIDTH, SIDES, width)?, self.whole(&HEIGHT, SIDES, height)?] }
            }
            // A size of two sides is one for all.
            Fit::Crop { size: [width, height], .. } if (self.find)("size.width").is_some() => {
                Fit::Stretch { size: [self.whole(&WIDTH, SIDES, width)?, self.whole(&HEIGHT, SIDES, height)?] }
            }
            Fit::Crop { shortest, size: [width, height] } => Fit::Crop {
                shortest: self.whole(&SHORTEST, SIDES, shortest)?,
                size: [self.whole(&CROP_WIDTH, SIDES, width)?, self.whole(&CROP_HEIGHT, SIDES, height)?],
            },
            Fit::Tiles { blocks, tiles, side, tolerance, whole } => Fit::Tiles {
                blocks: [self.whole(&LEAST_BLOCKS, COUNTS, blocks[0])?, self.whole(&MOST_BLOCKS, COUNTS, blocks[1])?],
                tiles: match self.is_off("do_image_splitting") {
                    true => [1, 1],
                    false => [self.whole(&LEAST_TILES, TILES, tiles[0])?, self.whole(&MOST_TILES, TILES, tiles[1])?],
                },
                side: self.whole(&TILE, SIDES, side)?,
                tolerance: self.number(&TOLERANCE, 0.0..=1e6)?.unwrap_or(tolerance),
                whole: whole && !self.is_off("use_thumbnail"),
            },
            Fit::Split { longest, side, is_cut } => Fit::Split {
                longest: self.whole(&LONGEST, SIDES, longest)?,
                side: self.whole(&SPLIT_TILE, SIDES, side)?,
                is_cut: is_cut && !self.is_off("do_image_splitting"),
            },
        })
    }

    /// Gemma 3 says how many rows a picture gives, and not how many patches are one of them.
    fn read_pooling(&self, preprocess: &mut Preprocess) -> Result<(), Error> {
        let Fit::Stretch { size } = preprocess.fit else { return Ok(()) };
        let Some((name, n_rows)) = self.value(&ROWS).filter(|_| preprocess.family == Family::Gemma3) else {
            return Ok(());
        };
        let side = size[0] / preprocess.patch;
        let fits = |merge: &u32| n_rows.as_u64() == Some(u64::from((side / merge) * (side / merge)));
        let merge = (1..=16).filter(|merge| side.is_multiple_of(*merge)).find(fits);
        let expected = || format!("the number of squares that {side} x {side} patches are cut into");
        preprocess.merge = merge.ok_or_else(|| wrong(name, expected(), n_rows.to_string()))?;
        Ok(())
    }

    /// The first name that is there, and its value.
    fn value(&self, key: &Key) -> Option<(&'static str, Value)> {
        match self.is_gguf {
            true => key.1.split('|').find_map(|name| Some((name, (self.find)(name)?))),
            false => key.0.iter().find_map(|name| Some((*name, (self.find)(name)?))),
        }
        // A size is a number, or an object with other names.
        .filter(|(_, value)| !value.is_object())
    }

    fn is_off(&self, name: &str) -> bool {
        (self.find)(name) == Some(Value::Bool(false))
    }

    fn number(&self, key: &Key, range: RangeInclusive<f64>) -> Result<Option<f64>, Error> {
        let Some((name, value)) = self.value(key) else { return Ok(None) };
        match value.as_f64().filter(|number| range.contains(number)) {
            Some(number) => Ok(Some(number)),
            None => Err(wrong(name, format!("a number from {} to {}", range.start(), range.end()), value.to_string())),
        }
    }

    fn whole(&self, key: &Key, range: RangeInclusive<f64>, default: u32) -> Result<u32, Error> {
        match self.number(key, range)? {
            Some(number) if number.fract() != 0.0 => {
                let name = self.value(key).map_or("", |(name, _)| name);
                Err(wrong(name, "a whole number".into(), number.to_string()))
            }
            number => Ok(number.map_or(default, |number| number as u32)),
        }
    }

    /// A number for each channel, or one for all.
    fn channels(&self, key: &Key, range: RangeInclusive<f64>, default: [f32; 3]) -> Result<[f32; 3], Error> {
        let Some((name, value)) = self.value(key) else { return Ok(default) };
        let number = |value: &Value| Some(value.as_f64().filter(|number| range.contains(number))? as f32);
        let channels = match &value {
            Value::Array(channels) => channels.iter().map(number).collect::<Option<Vec<f32>>>(),
            one => number(one).map(|one| vec![one; 3]),
        };
        let expected = format!("3 numbers from {} to {}", range.start(), range.end());
        channels.and_then(|channels| channels.try_into().ok()).ok_or_else(|| wrong(name, expected, value.to_string()))
    }
}

impl Preprocess {
    /// Whether the settings fit together.
    fn check(self) -> Result<Preprocess, Error> {
        let block = self.patch * self.merge;
        let is_whole = |length: &u32| length.is_multiple_of(block);
        let blocks = |name: &str, lengths: &[u32]| match lengths.iter().all(is_whole) {
            true => Ok(()),
            false => Err(wrong(name, format!("multiples of {block}"), format!("{lengths:?}"))),
        };
        let ordered = |name: &str, least: u64, most: u64| match least <= most {
            true => Ok(()),
            false => Err(wrong(name, format!("at least {least}, the minimum"), most.to_string())),
        };
        match &self.fit {
            Fit::Pixels { min, max } => ordered("max_pixels", *min, *max)?,
            Fit::Blocks { .. } | Fit::Patches { .. } => {}
            // SigLIP leaves out incomplete patches at the right and the bottom.
            Fit::Stretch { size } if self.family == Family::Siglip => {
                ordered("size", block.into(), size[0].min(size[1]).into())?;
            }
            Fit::Stretch { size } => blocks("size", size)?,
            Fit::Crop { shortest, size } => {
                blocks("crop_size", size)?;
                ordered("size.shortest_edge", size[0].max(size[1]).into(), (*shortest).into())?;
            }
            Fit::Tiles { blocks: [least, most], tiles, side, .. } => {
                ordered("max_image_tokens", (*least).into(), (*most).into())?;
                ordered("max_tiles", tiles[0].into(), tiles[1].into())?;
                ordered("min_tiles", 2, if tiles[1] == 1 { 2 } else { tiles[0].into() })?;
                blocks("tile_size", &[*side])?;
            }
            Fit::Split { side, .. } => blocks("max_image_size.longest_edge", &[*side])?,
        }
        Ok(self)
    }
}

fn wrong(field: &str, expected: String, found: String) -> Error {
    Error::Config { field: field.into(), expected, found }
}

fn unsupported(field: &str, found: String, supported: &str) -> Error {
    let (format, supported) = ("preprocessor", supported.into());
    Error::Unsupported { format, field: field.into(), found, supported }
}
