//! Preprocessing of each family, compared with its processor in transformers.

use serde_json::{Value, json};
use tilewright::picture::{Family, Fit, Patches, Picture, PixelOrder, Prepared, Preprocess, TextPart};

use super::{Pixels, References, json as file, message_of, path};

/// The token that rows take the place of.
pub(super) const ROW: u32 = 287;
/// Families that answer, and the largest difference of a level.
const ANSWERING: [(&str, Family, f64); 7] = [
    ("qwen3-vl", Family::Qwen3Vl, 1.0),
    ("gemma4-vl", Family::Gemma4, 1.0),
    ("gemma4-unified", Family::Gemma4Unified, 1.0),
    ("gemma3-vl", Family::Gemma3, 1.0),
    ("lfm2-vl", Family::Lfm2Vl, 1.0),
    ("lfm3-vl", Family::Lfm3Vl, 1.0),
    // Resized two and three times.
    ("smolvlm", Family::SmolVlm, 2.0),
];

/// The settings of a folder.
pub(super) fn preprocess(folder: &str) -> Preprocess {
    let files = ["preprocessor_config.json", "config.json"].map(|name| file(&format!("{folder}/{name}")));
    let family = Family::of_json(&files[0], &files[1]).unwrap();
    Preprocess::from_json(family, &files[0], &files[1]).unwrap()
}

/// The pictures of each case.
pub(super) fn cases(folder: &str) -> Vec<Vec<String>> {
    let names = |names: &Value| names.as_array().unwrap().iter().map(|name| name.as_str().unwrap().into()).collect();
    match file(&format!("{folder}/cases.json")) {
        Value::Array(cases) => cases.iter().map(|case| names(&case["images"])).collect(),
        one => names(&one["images"]).into_iter().map(|name: String| vec![name]).collect(),
    }
}

/// Where value `at` of patch `patch` is in the reference of its tile.
fn place(folder: &str, patches: &Patches, patch: usize, at: usize, side: usize) -> usize {
    let [row, column] = patches.places[patch].map(|place| place as usize);
    let columns = patches.grid[1] as usize;
    match folder {
        // In merge-block order.
        "qwen3-vl" | "lfm3-vl" => patch * 3 * side * side + at,
        // Row by row.
        "gemma4-vl" | "gemma4-unified" | "lfm2-vl" => (row * columns + column) * 3 * side * side + at,
        // Not cut.
        _ => {
            let (channel, y, x) = (at / (side * side), at / side % side, at % side);
            (channel * patches.grid[0] as usize * side + row * side + y) * columns * side + column * side + x
        }
    }
}

/// The largest difference in levels, and the share of values that differ.
fn differences(folder: &str, preprocess: &Preprocess, prepared: &Prepared, levels: &[u8]) -> (f64, f64) {
    let side = preprocess.patch as usize;
    let is_last = preprocess.order == PixelOrder::ChannelLast;
    let per_tile = levels.len() / prepared.tiles.len();
    let (mut largest, mut n_different, mut n) = (0.0, 0, 0);
    for (tile, levels) in prepared.tiles.iter().zip(levels.chunks(per_tile)) {
        for (patch, values) in tile.values.chunks(tile.patch_dim as usize).enumerate() {
            for (at, &value) in values.iter().enumerate() {
                let channel = if is_last { at % 3 } else { at / (side * side) };
                let (mean, std) = (f64::from(preprocess.mean[channel]), f64::from(preprocess.std[channel]));
                let level = f64::from(levels[place(folder, tile, patch, at, side)]);
                let difference = (f64::from(value) - (level / 255.0 - mean) / std).abs() * std * 255.0;
                largest = difference.max(largest);
                n_different += usize::from(difference > 1e-3);
                n += 1;
            }
        }
    }
    (largest, n_different as f64 / n as f64)
}

#[test]
fn pixel_values_are_those_of_transformers() {
    let pixels = Pixels::open();
    let embedding = [("clip", Family::Clip, 1.0), ("siglip2", Family::Siglip, 1.0)];
    let mut n_compared = 0;
    for (folder, family, tolerance) in ANSWERING.into_iter().chain(embedding) {
        let preprocess = preprocess(folder);
        assert_eq!(preprocess.family, family);
        let references = References::open(&path(&format!("{folder}/refs.safetensors")));
        for (case, names) in cases(folder).iter().enumerate() {
            let key = format!("{case}.levels");
            let [name] = &names[..] else { continue };
            if !references.has(&key) {
                continue;
            }
            let prepared = preprocess.prepare(&pixels.get(&format!("{name}.rgb"))).unwrap();
            for tile in &prepared.tiles {
                assert_eq!(tile.places.len() as u32, tile.grid[0] * tile.grid[1]);
                assert_eq!(tile.values.len(), tile.places.len() * tile.patch_dim as usize);
            }
            let (largest, share) = differences(folder, &preprocess, &prepared, references.bytes(&key));
            println!("{folder}, {name}: {largest:.2} levels, {:.2} % of values", share * 100.0);
            assert!(largest < tolerance + 1e-3 && share <= 0.03, "{folder}, {name}: {largest}, {share}");
            n_compared += 1;
        }
    }
    assert!(n_compared >= 13, "{n_compared}");
}

/// Grids, numbers of tiles and rows.
#[test]
fn layouts_are_those_of_transformers() {
    let pixels = Pixels::open();
    for (folder, ..) in ANSWERING {
        let preprocess = preprocess(folder);
        let references = References::open(&path(&format!("{folder}/refs.safetensors")));
        for (case, names) in cases(folder).iter().enumerate().filter(|(_, names)| !names.is_empty()) {
            let ids =
                |key: &str| references.has(&format!("{case}.{key}")).then(|| references.ids(&format!("{case}.{key}")));
            let prepared: Vec<_> =
                names.iter().map(|name| preprocess.prepare(&pixels.get(&format!("{name}.rgb"))).unwrap()).collect();
            for (prepared, name) in prepared.iter().zip(names) {
                let picture = pixels.get(&format!("{name}.rgb"));
                assert_eq!(preprocess.layout(picture.width(), picture.height()).unwrap(), prepared.layout);
            }
            let n_rows: u32 = prepared.iter().map(|prepared| prepared.layout.n_rows()).sum();
            let n_tokens = ids("ids").unwrap().iter().filter(|id| **id == ROW).count();
            assert_eq!(n_rows as usize, n_tokens, "{folder}, case {case}");
            let grids = prepared.iter().flat_map(|prepared| prepared.tiles.iter().map(|tile| tile.grid));
            if let Some(thw) = ids("image_grid_thw") {
                assert_eq!(grids.clone().flat_map(|[rows, columns]| [1, rows, columns]).collect::<Vec<_>>(), thw);
            }
            if let Some(shapes) = ids("spatial_shapes") {
                assert_eq!(grids.flatten().collect::<Vec<_>>(), shapes, "{folder}, case {case}");
            }
            if let Some(counts) = ids("num_soft_tokens_per_image") {
                assert_eq!(prepared.iter().map(|prepared| prepared.layout.n_rows()).collect::<Vec<_>>(), counts);
            }
            // Of a picture that is not cut LFM2-VL says 1, and SmolVLM 0.
            if let (Some(rows), Some(columns)) = (ids("image_rows"), ids("image_cols")) {
                let cut = prepared.iter().map(|prepared| [prepared.layout.rows, prepared.layout.columns]);
                let want = rows.iter().zip(&columns).map(|(rows, columns)| match (folder, rows, columns) {
                    ("lfm2-vl", 1, 1) => [0, 0],
                    _ => [*rows, *columns],
                });
                assert!(cut.eq(want), "{folder}, case {case}");
            }
        }
    }
}

/// The places of Gemma 4's patches, which the processor lists row by row.
#[test]
fn places_are_those_of_transformers() {
    let pixels = Pixels::open();
    for folder in ["gemma4-vl", "gemma4-unified"] {
        let references = References::open(&path(&format!("{folder}/refs.safetensors")));
        let prepared = preprocess(folder).prepare(&pixels.get("a.png.rgb")).unwrap();
        let mut places = prepared.tiles[0].places.clone();
        places.sort();
        let want = references.ids("0.image_position_ids");
        let want = want.chunks(2).map(|place| [place[1], place[0]]).filter(|place| *place != [u32::MAX; 2]);
        assert!(places.into_iter().eq(want), "{folder}");
    }
}

/// Ids of the references for a part of a text.
fn ids_of(part: &TextPart, folder: &str) -> Vec<u32> {
    let text = match part {
        TextPart::Rows { count, .. } => return vec![ROW; *count as usize],
        TextPart::Text(text) => text.as_str(),
    };
    let tile = |row: u32, column: u32| match folder {
        "smolvlm" => (format!("<row_{}_col_{}>", row + 1, column + 1), 270 + 3 * row + column),
        _ => (format!("<|img_row_{}_col_{}|>", row + 1, column + 1), 270 + 2 * row + column),
    };
    let tiles = (0..2).flat_map(|row| (0..2).map(move |column| (row, column))).map(|(row, column)| tile(row, column));
    let known: Vec<(String, u32)> = [
        ("<|vision_start|>", 285),
        ("<|vision_end|>", 286),
        ("<|image>", 285),
        ("<image|>", 286),
        ("\n\n<start_of_image>", 285),
        ("<end_of_image>\n\n", 286),
        ("<|image_start|>", 285),
        ("<|image_end|>", 286),
        ("<|img_thumbnail|>", 284),
        ("<fake_token_around_image>", 285),
        ("<global-img>", 284),
        ("\n", 12),
    ]
    .map(|(text, id)| (text.into(), id))
    .into_iter()
    .chain(tiles)
    .collect();
    let (mut rest, mut ids) = (text, Vec::new());
    while !rest.is_empty() {
        let (text, id) = known.iter().find(|(text, _)| rest.starts_with(text)).unwrap_or_else(|| panic!("{rest:?}"));
        ids.push(*id);
        rest = &rest[text.len()..];
    }
    ids
}

/// The tokens of each picture are in the ids of its text, one after the other.
#[test]
fn text_is_that_of_transformers() {
    let pixels = Pixels::open();
    for (folder, ..) in ANSWERING {
        let preprocess = preprocess(folder);
        let references = References::open(&path(&format!("{folder}/refs.safetensors")));
        for (case, names) in cases(folder).iter().enumerate() {
            let ids = references.ids(&format!("{case}.ids"));
            let is_special = |id: &u32| (270..=287).contains(id);
            let mut from = 0;
            for name in names {
                let picture = pixels.get(&format!("{name}.rgb"));
                let layout = preprocess.layout(picture.width(), picture.height()).unwrap();
                let text = preprocess.text(&layout);
                let want: Vec<u32> = text.iter().flat_map(|part| ids_of(part, folder)).collect();
                let begin = from + ids[from..].iter().position(is_special).unwrap();
                assert_eq!(ids[begin..begin + want.len()], want, "{folder}, {name}");
                from = begin + want.len();
                let tiles = text.iter().filter_map(|part| match part {
                    TextPart::Rows { tile, .. } => Some(*tile),
                    TextPart::Text(_) => None,
                });
                assert!(tiles.eq(0..layout.tile_rows.len()));
            }
            assert!(!ids[from..].iter().any(is_special), "{folder}, case {case}: tokens of a picture are left");
        }
    }
}

/// Keys of an mmproj file, and the defaults of llama.cpp and transformers for those that it leaves out.
#[test]
fn settings_of_gguf_files() {
    let read = |projector: &str, keys: Value| {
        Preprocess::from_gguf(Family::of_projector(projector).unwrap(), &|name| keys.get(name).cloned())
    };
    let common =
        json!({"patch_size": 8, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5], "image_size": 48});
    let with = |more: Value| {
        let mut keys = common.clone();
        keys.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        keys
    };
    // The same as of the JSON files, where GGUF has the keys.
    let mut same = preprocess("smolvlm");
    let keys = json!({"projector.scale_factor": 2, "preproc_image_size": 96});
    assert_eq!(read("idefics3", with(keys)).unwrap(), same);
    same = preprocess("qwen3-vl");
    let keys = json!({"spatial_merge_size": 2, "image_min_pixels": 256, "image_max_pixels": 5120});
    assert_eq!(read("qwen3vl_merger", with(keys)).unwrap(), same);
    same.fit = Fit::Pixels { min: 8 * 256, max: 4096 * 256 };
    assert_eq!(read("qwen3vl_merger", with(json!({"spatial_merge_size": 2}))).unwrap(), same);
    same = preprocess("gemma3-vl");
    assert_eq!(read("gemma3", with(json!({"projector.scale_factor": 2}))).unwrap(), same);
    for (folder, projector) in [("gemma4-vl", "gemma4v"), ("gemma4-unified", "gemma4uv")] {
        let same = Preprocess { fit: Fit::Blocks { max: 280 }, order: PixelOrder::ChannelFirst, ..preprocess(folder) };
        assert_eq!(
            read(projector, json!({"patch_size": 4, "image_mean": [0, 0, 0], "image_std": [1, 1, 1]})).unwrap(),
            same
        );
    }
    assert_eq!(Family::of_projector("qwen2vl_merger"), None);
    assert_eq!(Family::of_projector(""), None);
    assert_eq!(
        message_of(read("gemma3", common.clone())),
        "model configuration: size is [48, 48], expected multiples of 32"
    );
}

#[test]
fn wrong_settings_are_named() {
    let folder = "lfm2-vl";
    let config = file(&format!("{folder}/config.json"));
    let mut settings = file(&format!("{folder}/preprocessor_config.json"));
    let mut refused = |family, key: &str, value: Value| {
        let before = std::mem::replace(&mut settings[key], value);
        let message = message_of(Preprocess::from_json(family, &settings, &config));
        settings[key] = before;
        message
    };
    let lfm2 = Family::Lfm2Vl;
    let message = "model configuration: tile_size is [50], expected multiples of 16";
    assert_eq!(refused(lfm2, "tile_size", json!(50)), message);
    let message = "model configuration: encoder_patch_size is 0, expected a number from 1 to 128";
    assert_eq!(refused(lfm2, "encoder_patch_size", json!(0)), message);
    let message = "model configuration: encoder_patch_size is 7.5, expected a whole number";
    assert_eq!(refused(lfm2, "encoder_patch_size", json!(7.5)), message);
    let message = "model configuration: image_std is [0.5,0,0.5], expected 3 numbers from 0.001 to 1000";
    assert_eq!(refused(lfm2, "image_std", json!([0.5, 0, 0.5])), message);
    let message =
        "preprocessor: resample is 4, which is not supported (supported: 1 (Lanczos), 2 (bilinear) or 3 (bicubic))";
    assert_eq!(refused(lfm2, "resample", json!(4)), message);
    assert!(
        refused(lfm2, "max_tiles", json!(1)).starts_with("model configuration: max_tiles is 1, expected at least 2")
    );
    assert!(refused(lfm2, "do_rescale", json!(false)).starts_with("preprocessor: do_rescale is false"));
    assert!(
        refused(lfm2, "max_image_tokens", json!("many")).contains("max_image_tokens is \"many\", expected a number")
    );
    assert!(refused(lfm2, "rescale_factor", json!(0.5)).starts_with("preprocessor: rescale_factor is 0.5"));
    let message = "preprocessor: do_center_crop is false, which is not supported (supported: true)";
    assert_eq!(refused(Family::Clip, "do_center_crop", json!(false)), message);
    assert!(
        refused(Family::Gemma3, "do_pan_and_scan", json!(true)).starts_with("preprocessor: do_pan_and_scan is true")
    );
}

/// Rows of each tile by the rules of transformers 5.24, for pictures that are larger, smaller or more elongated.
#[test]
fn odd_sizes() {
    let published = |model_type: &str, settings: Value| {
        let config = json!({"model_type": model_type});
        Preprocess::from_json(Family::of_json(&settings, &config).unwrap(), &settings, &config).unwrap()
    };
    let rows = |preprocess: &Preprocess, width, height| preprocess.layout(width, height).map(|layout| layout.tile_rows);
    let qwen = json!({"size": {"shortest_edge": 65_536, "longest_edge": 16_777_216}});
    let naflex = json!({"image_processor_type": "Siglip2ImageProcessor"});
    for (preprocess, width, height, want) in [
        (preprocess("qwen3-vl"), 1, 1, vec![1]),
        (preprocess("qwen3-vl"), 4000, 3000, vec![15]),
        (published("qwen3_5", qwen.clone()), 33, 47, vec![70]),
        (published("qwen3_5", qwen), 4000, 3000, vec![11_750]),
        (preprocess("gemma4-vl"), 1, 4000, vec![12]),
        (preprocess("gemma4-vl"), 1, 1, vec![9]),
        (published("gemma4", json!({})), 4000, 1, vec![280]),
        (published("gemma4", json!({})), 33, 47, vec![266]),
        (published("gemma4_unified", json!({})), 3000, 4000, vec![266]),
        (preprocess("gemma3-vl"), 1, 4000, vec![9]),
        (preprocess("lfm2-vl"), 1, 1, vec![4]),
        (preprocess("lfm2-vl"), 4000, 1, vec![9, 9, 9, 9, 189]),
        (published("lfm2_vl", json!({})), 512, 512, vec![256]),
        (published("lfm2_vl", json!({})), 4000, 3000, vec![256, 256, 256, 256, 256, 256, 234]),
        (preprocess("smolvlm"), 4000, 1, vec![9; 3]),
        (preprocess("smolvlm"), 1, 1, vec![9; 5]),
        (published("smolvlm", json!({})), 33, 47, vec![64; 13]),
        (published("smolvlm", json!({"do_image_splitting": false})), 33, 47, vec![64]),
        (published("siglip2", naflex.clone()), 33, 47, vec![247]),
        (published("siglip2", naflex.clone()), 4000, 3000, vec![252]),
        (published("siglip2", naflex), 1, 4000, vec![256]),
        (preprocess("clip"), 1, 4000, vec![36]),
        (preprocess("siglip2"), 7, 4000, vec![36]),
    ] {
        assert_eq!(rows(&preprocess, width, height).unwrap(), want, "{:?}, {width} x {height}", preprocess.family);
    }
    let message = "picture: its size for this model is 1 x 4000, which is not supported (supported: sides up to 200 \
                   times as long as each other)";
    assert_eq!(message_of(preprocess("qwen3-vl").layout(1, 4000)), message);
    assert!(message_of(preprocess("clip").layout(0, 1)).contains("sides above 0"));
}

/// CLIP takes the middle of a picture.
#[test]
fn middle_is_cut_out() {
    let clip = preprocess("clip");
    let gradient: Vec<u8> = (0..4000u32).flat_map(|y| [(y / 16) as u8; 3]).collect();
    let square = json!({"size": {"width": 64, "height": 96}, "crop_size": 96});
    let square = Preprocess::from_json(Family::Clip, &square, &json!({})).unwrap();
    assert_eq!(square.fit, Fit::Stretch { size: [64, 96] });
    let older = Preprocess::from_json(Family::Clip, &json!({"size": 336, "crop_size": 320}), &json!({})).unwrap();
    assert_eq!(older.fit, Fit::Crop { shortest: 336, size: [320, 320] });
    let prepared = clip.prepare(&Picture::new(1, 4000, gradient).unwrap()).unwrap();
    // The middle of the picture.
    let level = prepared.tiles[0].values[0] * clip.std[0] + clip.mean[0];
    assert!((level * 255.0 - 2000.0 / 16.0).abs() < 2.0, "{level}");
}
