//! Picture files, and the settings and sizes that pictures are prepared by.

use std::sync::OnceLock;

use serde_json::json;
#[cfg(feature = "pictures")]
use tilewright::picture::PictureLimits;
use tilewright::picture::{Family, Picture, Preprocess, TextPart};

use super::{common, fuzz, mutate};
use crate::allocator::measure;

/// Decoded pixels of a fuzzed picture, and bytes for a file's other parts: a decoder's limit.
const MAX_PIXELS: u64 = 1 << 16;
const MAX_EXTRA: usize = 160 << 20;

/// Small files of all formats.
#[cfg(feature = "pictures")]
fn files() -> &'static [Vec<u8>] {
    static FILES: OnceLock<Vec<Vec<u8>>> = OnceLock::new();
    FILES.get_or_init(|| {
        let folder = common::find_data(std::path::Path::new("pictures/odd")).expect("committed test data");
        let mut paths: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
        paths.sort();
        let files: Vec<_> = paths.into_iter().map(|path| std::fs::read(path).unwrap()).collect();
        files.into_iter().filter(|bytes| bytes.len() < 4000).collect()
    })
}

#[cfg(feature = "pictures")]
#[test]
fn picture_decode() {
    fuzz("picture_decode", 2000, |rng| {
        let mut bytes = files()[rng.below(files().len())].clone();
        // Most of what decides is at the beginning.
        let end = if rng.below(2) == 0 { 64 } else { bytes.len() };
        mutate::bytes(rng, &mut bytes, end);
        let limits = PictureLimits { max_pixels: MAX_PIXELS, ..PictureLimits::default() };
        let (picture, asked) = measure(|| Picture::decode(&bytes, &limits));
        assert!(asked.peak <= MAX_EXTRA, "{asked:?} for {} bytes", bytes.len());
        match picture {
            Ok(picture) => {
                let n_pixels = u64::from(picture.width()) * u64::from(picture.height());
                assert!(n_pixels <= MAX_PIXELS && picture.rgb().len() as u64 == 3 * n_pixels);
                true
            }
            Err(error) => {
                let message = error.to_string();
                assert!(!message.is_empty() && message.len() < 2000 && !message.contains('\0'), "{message}");
                false
            }
        }
    });
}

/// Settings of any values, and pictures of any sizes: refused, or of consistent layouts.
#[test]
fn picture_prepare() {
    static SETTINGS: OnceLock<Vec<serde_json::Value>> = OnceLock::new();
    let settings = SETTINGS.get_or_init(|| {
        let folder = common::find_data(std::path::Path::new("pictures")).expect("committed test data");
        let names = ["qwen3-vl", "gemma4-vl", "gemma4-unified", "lfm2-vl", "smolvlm", "gemma3-vl", "clip", "siglip2"];
        let read = |path| serde_json::from_slice::<serde_json::Value>(&std::fs::read(path).unwrap()).unwrap();
        let pair = |name| ["preprocessor_config.json", "config.json"].map(|file| read(folder.join(name).join(file)));
        names.iter().map(pair).map(|[preprocessor, config]| json!([preprocessor, config])).collect()
    });
    fuzz("picture_prepare", 2000, |rng| {
        let mut pair = settings[rng.below(settings.len())].clone();
        if rng.below(4) > 0 {
            mutate::json(rng, &mut pair);
        }
        let Some(family) = Family::of_json(&pair[0], &pair[1]) else { return false };
        let Ok(preprocess) = Preprocess::from_json(family, &pair[0], &pair[1]) else { return false };
        let side = |rng: &mut super::builder::Rng| match rng.below(4) {
            0 => rng.next() as u32,
            1 => rng.below(70_000) as u32,
            _ => 1 + rng.below(64) as u32,
        };
        let (width, height) = (side(rng), side(rng));
        let Ok(layout) = preprocess.layout(width, height) else { return false };
        let n_tiles = layout.rows as usize * layout.columns as usize;
        assert!(layout.tile_rows.len() == n_tiles || layout.tile_rows.len() == n_tiles + 1, "{layout:?}");
        let rows = preprocess.text(&layout).into_iter().filter_map(|part| match part {
            TextPart::Rows { count, .. } => Some(count),
            TextPart::Text(_) => None,
        });
        assert!(rows.eq(layout.tile_rows.iter().copied()));
        let patches_of_row = u64::from(preprocess.merge * preprocess.merge);
        let n_values = u64::from(layout.n_rows()) * patches_of_row * u64::from(3 * preprocess.patch * preprocess.patch);
        if u64::from(width) * u64::from(height) > 1 << 14 || n_values > 1 << 20 {
            return true;
        }
        let picture = Picture::new(width, height, vec![77; (3 * width * height) as usize]).unwrap();
        let Ok(prepared) = preprocess.prepare(&picture) else { return false };
        assert_eq!(prepared.layout, layout);
        for (tile, n_rows) in prepared.tiles.iter().zip(&layout.tile_rows) {
            assert_eq!(tile.places.len() as u64, u64::from(*n_rows) * patches_of_row);
            assert_eq!(tile.values.len(), tile.places.len() * tile.patch_dim as usize);
            assert!(tile.values.iter().all(|value| value.is_finite()));
        }
        true
    });
}
