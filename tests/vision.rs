//! Models that take pictures against transformers' references: vision encoders layer by layer, rows of pictures in a
//! text, logits and greedy continuations. Pixels are given; those from files are compared in `picture.rs`.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use tilewright::engine::{Engine, EngineOptions, Request};
use tilewright::formats::Gguf;
use tilewright::formats::gguf::{Value, ValueType};
use tilewright::formats::gguf_writer::GgufHeader;
use tilewright::kernels::KvType;
use tilewright::load::{ModelFile, ModelShape, VisionFile};
use tilewright::model::{ModelConfig, RowAttention, VisionConfig};
use tilewright::picture::Patches;
use tilewright::{Device, Error, GenerateOptions, ImageRows, LoadOptions, Model, VisionEncoder, VisionOptions};

use crate::common::shared::{self, executors};
use crate::common::{self, References, block_on, both, largest_difference};
use tilewright::Tier;

/// The token that stands for a row of a picture in the references.
const ROW: u32 = 287;

/// A model with references.
struct Case {
    folder: &'static str,
    /// Patches on a side of a block that becomes a row.
    merge: u32,
    /// Largest difference of rows and hidden values of the encoder, and of logits.
    tolerances: [f32; 2],
    /// Whether the text model gets the references' rows: where weights are not scaled, logits depend on the last bits.
    given_rows: bool,
}

const QWEN3_VL: Case = Case { folder: "qwen3-vl", merge: 2, tolerances: [1e-4, 2e-4], given_rows: false };

impl Case {
    fn path(&self) -> Option<PathBuf> {
        Some(common::data(&["tiny-random-pictures"])?.join("tiny-random-pictures").join(self.folder))
    }

    /// The folder, and the GGUF files: text model and vision encoder. Without a text model as GGUF, the folder's.
    fn files(&self, folder: &Path) -> Vec<[PathBuf; 2]> {
        let [text, vision] = ["model-bf16.gguf", "mmproj-bf16.gguf"].map(|name| folder.join(name));
        let text = if text.exists() { text } else { folder.to_path_buf() };
        let all = [[folder.to_path_buf(), folder.to_path_buf()], [text, vision]];
        all.into_iter().filter(|files| files.iter().all(|path| path.exists())).collect()
    }

    /// The tiles of a case's pictures, from the pixels that the processor gave. `by_channel`: patches have all values of
    /// a channel side by side, as GGUF files want them.
    fn tiles(&self, references: &References, case: usize, by_channel: bool) -> Vec<Patches> {
        let name = |name: &str| format!("{case}.{name}");
        let values = references.floats(&name("pixel_values"));
        let has = |key: &str| references.has(&name(key));
        if has("image_position_ids") {
            // Column and row of each patch, -1 for padding.
            let places: Vec<[i32; 2]> = references
                .ids(&name("image_position_ids"))
                .chunks_exact(2)
                .map(|at| [at[1] as i32, at[0] as i32])
                .collect();
            let width = values.len() / places.len();
            let n = places.iter().position(|place| place[0] < 0).unwrap_or(places.len());
            let grid = [0, 1].map(|axis| places[..n].iter().map(|place| place[axis] as u32 + 1).max().unwrap());
            assert!((0..n).all(|i| places[i] == [i as i32 / grid[1] as i32, i as i32 % grid[1] as i32]), "row by row");
            // The tower doubles them around 0; patches of colours side by side.
            let level = |value: &f32| if self.merge > 1 { 2.0 * value - 1.0 } else { *value };
            let values: Vec<f32> = values[..n * width].iter().map(level).collect();
            let apart =
                |patch: &[f32]| (0..3).flat_map(|c| patch.iter().skip(c).step_by(3).copied()).collect::<Vec<_>>();
            let values = if by_channel { values.chunks_exact(width).flat_map(apart).collect() } else { values };
            return vec![self.patches(values, grid, true)];
        }
        if has("image_grid_thw") {
            let grid = references.ids(&name("image_grid_thw"));
            let (rows, columns) = (grid[1], grid[2]);
            // Two equal frames of each channel; patches are in merge order.
            let pixels = values.len() / (rows * columns * 6) as usize;
            let values = values.chunks_exact(2 * pixels).flat_map(|frames| frames[..pixels].to_vec()).collect();
            return vec![self.patches(values, [rows, columns], false)];
        }
        if has("spatial_shapes") {
            let shapes = references.ids(&name("spatial_shapes"));
            let width = values.len() / (shapes.len() / 2) / 36;
            let tiles = values.chunks_exact(36 * width).zip(shapes.chunks_exact(2));
            let cut = |(values, grid): (&[f32], &[u32])| {
                let n = (grid[0] * grid[1]) as usize;
                self.patches(values[..n * width].to_vec(), [grid[0], grid[1]], true)
            };
            return tiles.map(cut).collect();
        }
        // Square tiles of 6 x 6 patches, channel by channel.
        let (side, n) = (48, 6);
        let patch = side / n;
        let cut = |tile: &[f32]| {
            let pixel = |at: usize, channel: usize, y: usize, x: usize| {
                let (row, column) = (at / n, at % n);
                tile[(channel * side + row * patch + y) * side + column * patch + x]
            };
            let places = (0..n * n).flat_map(|at| (0..3).map(move |channel| (at, channel)));
            let rows = places.flat_map(|(at, channel)| (0..patch * patch).map(move |i| (at, channel, i)));
            let values = rows.map(|(at, channel, i)| pixel(at, channel, i / patch, i % patch)).collect();
            self.patches(values, [n as u32; 2], true)
        };
        values.chunks_exact(3 * side * side).map(cut).collect()
    }

    /// Patches of a grid, which are row by row or in merge order.
    fn patches(&self, values: Vec<f32>, grid: [u32; 2], by_row: bool) -> Patches {
        let places = self.places(grid);
        let width = values.len() / places.len();
        let values = if by_row { merged(&values, width, grid, &places) } else { values };
        Patches { values, patch_dim: width as u32, grid, places }
    }

    /// Row and column of each patch, block by block.
    fn places(&self, [rows, columns]: [u32; 2]) -> Vec<[u32; 2]> {
        let mut places: Vec<[u32; 2]> = (0..rows * columns).map(|at| [at / columns, at % columns]).collect();
        places.sort_by_key(|[row, column]| (row / self.merge, column / self.merge));
        places
    }
}

/// Rows of a grid, row by row, in the order of these places.
fn merged(rows: &[f32], width: usize, grid: [u32; 2], places: &[[u32; 2]]) -> Vec<f32> {
    let row = |[row, column]: &[u32; 2]| &rows[(row * grid[1] + column) as usize * width..][..width];
    places.iter().flat_map(row).copied().collect()
}

/// Devices that all cases run on.
fn devices() -> Vec<Device> {
    executors().into_iter().chain(shared::gpus_beside_cpu([Tier::Baseline])).collect()
}

/// The ids of a case with those of the images in place of [`ROW`].
fn placed(ids: &[u32], images: &[Arc<ImageRows>]) -> Vec<u32> {
    let mut rows = images.iter().flat_map(|image| image.ids.clone());
    ids.iter().map(|&id| if id == ROW { rows.next().unwrap() } else { id }).collect()
}

fn load(device: &Device, path: &Path) -> Model {
    let options = LoadOptions { kv_type: KvType::F32, exact: true, ..LoadOptions::default() };
    Model::load(device, path, options).unwrap_or_else(|e| panic!("{e}"))
}

fn check(case: &Case) {
    let Some(folder) = case.path() else { return };
    let references = References::open(&folder.join("refs.safetensors"));
    for [text, vision] in case.files(&folder) {
        for device in devices() {
            let what = format!("{} on {} ({})", vision.display(), device.info().name, device.tier().name());
            let encoder = VisionEncoder::load(&device, &vision, VisionOptions::default()).unwrap();
            let by_channel = vision.extension().is_some_and(|end| end == "gguf");
            let images = [0, 1].map(|i| check_encoder(case, &encoder, (&references, i, by_channel), &what));
            check_text(case, &load(&device, &text), (&references, &images), &what);
            common::assert_tested(&device);
        }
    }
}

/// Compares the encoder's layers and rows, and returns the rows of each tile.
fn check_encoder(
    case: &Case,
    encoder: &VisionEncoder,
    (references, i, by_channel): (&References, usize, bool),
    what: &str,
) -> Vec<Arc<ImageRows>> {
    let tiles = case.tiles(references, i, by_channel);
    let [tolerance, _] = case.tolerances;
    if i == 0 && references.has("0.vision_layers") {
        check_layers(case, encoder, references, &tiles, what);
    }
    let mut images: Vec<ImageRows> =
        tiles.iter().map(|patches| block_on(encoder.encode_patches(patches)).unwrap()).collect();
    let rows = |at: usize| images.iter().flat_map(|image| image.rows[at].clone()).collect::<Vec<f32>>();
    let want = references.floats(&format!("{i}.image_embeds"));
    let difference = largest_difference(&rows(0), &want);
    println!("{what}: rows of case {i} within {difference:.1e}");
    assert!(difference <= tolerance, "{what}: rows differ by {difference}");
    let n_deepstack = images[0].rows.len() - 1;
    if n_deepstack > 0 {
        let got = (1..=n_deepstack).flat_map(rows).collect::<Vec<f32>>();
        let difference = largest_difference(&got, &references.floats(&format!("{i}.deepstack")));
        assert!(difference <= tolerance, "{what}: deepstack rows differ by {difference}");
    }
    if case.given_rows {
        let mut rest = &want[..];
        for image in &mut images {
            let (own, after) = rest.split_at(image.rows[0].len());
            image.rows[0] = own.to_vec();
            rest = after;
        }
    }
    images.into_iter().map(Arc::new).collect()
}

fn check_layers(case: &Case, encoder: &VisionEncoder, references: &References, tiles: &[Patches], what: &str) {
    let want = references.floats("0.vision_layers");
    let traces: Vec<_> = tiles.iter().map(|patches| block_on(encoder.trace(patches)).unwrap()).collect();
    let width = encoder.config().encoder.dim as usize;
    // Padded to the patches of the largest tile in each layer.
    let n_padded = want.len() / traces[0].len() / tiles.len();
    let by_row = !references.has("0.image_grid_thw");
    for (layer, want) in want.chunks_exact(n_padded * tiles.len()).enumerate() {
        for ((trace, patches), want) in traces.iter().zip(tiles).zip(want.chunks_exact(n_padded)) {
            let want = &want[..patches.places.len() * width];
            let want =
                if by_row { merged(want, width, patches.grid, &case.places(patches.grid)) } else { want.to_vec() };
            let difference = largest_difference(&trace[layer], &want);
            assert!(difference <= case.tolerances[0], "{what}: layer {layer} differs by {difference}");
        }
    }
}

/// The largest difference of the logits of tokens after the pictures: the first in one pass with them, the others one by
/// one.
fn logits_after(model: &Model, (references, i): (&References, usize), images: &[Arc<ImageRows>]) -> f32 {
    let ids = placed(&references.ids(&format!("{i}.ids")), images);
    let want = match i {
        0 => references.floats("0.logits"),
        _ => references.floats(&format!("{i}.last_logits")),
    };
    let rows: Vec<&[f32]> = want.chunks_exact(model.config().vocab_size as usize).collect();
    let n_after = ids.iter().rev().take_while(|&&id| id < ROW).count().min(rows.len());
    let mut session = model.session().unwrap();
    session.set_images(images).unwrap();
    let mut worst = 0.0f32;
    for (at, want) in (ids.len() - n_after..).zip(&rows[rows.len() - n_after..]) {
        let next = if session.tokens().is_empty() { &ids[..=at] } else { &ids[at..=at] };
        let logits = block_on(session.logits(next)).unwrap();
        worst = worst.max(largest_difference(&logits, want));
    }
    worst
}

fn check_text(case: &Case, model: &Model, (references, images): (&References, &[Vec<Arc<ImageRows>>; 2]), what: &str) {
    let [_, tolerance] = case.tolerances;
    for (i, images) in images.iter().enumerate() {
        let worst = logits_after(model, (references, i), images);
        println!("{what}: logits after case {i} within {worst:.1e}");
        assert!(worst <= tolerance, "{what}: logits after case {i} differ by {worst}");
    }
    let greedy = references.ids("greedy.case")[0] as usize;
    let ids = placed(&references.ids(&format!("{greedy}.ids")), &images[greedy]);
    let want = references.ids("greedy.ids");
    let margins = references.floats("greedy.margins");
    let certain = margins.iter().position(|&margin| margin < 2.0 * tolerance).unwrap_or(want.len());
    let options = GenerateOptions { ignore_eos: true, ..GenerateOptions::greedy(want.len()) };
    let mut session = model.session().unwrap();
    session.set_images(&images[greedy]).unwrap();
    let mut generation = session.generate_ids(&ids, &options).unwrap();
    let mut got = Vec::new();
    while let Some(piece) = block_on(generation.next()) {
        got.push(piece.unwrap().id);
    }
    assert_eq!(got[..certain], want[..certain], "{what}");
    // The engine: cold, then with a cached prefix, beside another picture's text.
    let engine = Engine::spawn(model, &EngineOptions::default()).unwrap();
    let request = |ids: &[u32], images: &[Arc<ImageRows>]| Request {
        images: images.to_vec(),
        ..Request::new(ids.to_vec(), options.clone())
    };
    let other = placed(&references.ids("1.ids"), &images[1]);
    for _ in 0..2 {
        let both = [request(&ids, &images[greedy]), request(&other, &images[1])];
        let [answer, _] = both.map(|request| engine.submit(request).unwrap()).map(ids_of);
        assert_eq!(answer[..certain], want[..certain], "{what}: engine");
    }
}

fn ids_of(mut stream: tilewright::engine::Stream) -> Vec<u32> {
    let mut ids = Vec::new();
    while let Some(piece) = block_on(stream.next()) {
        ids.push(piece.unwrap().id);
    }
    ids
}

#[test]
fn qwen3_vl_has_the_references_rows_and_logits() {
    check(&QWEN3_VL);
}

#[test]
fn qwen35_vl_has_the_references_rows_and_logits() {
    // Delta rules over unscaled random weights.
    check(&Case { folder: "qwen35-vl", tolerances: [1e-4, 3e-3], given_rows: true, ..QWEN3_VL });
}

#[test]
fn lfm2_vl_has_the_references_rows_and_logits() {
    check(&Case { folder: "lfm2-vl", ..QWEN3_VL });
}

#[test]
fn smolvlm_has_the_references_rows_and_logits() {
    check(&Case { folder: "smolvlm", ..QWEN3_VL });
}

#[test]
fn gemma3_vl_has_the_references_rows_and_logits() {
    check(&Case { folder: "gemma3-vl", ..QWEN3_VL });
}

#[test]
fn gemma4_vl_has_the_references_rows_and_logits() {
    check(&Case { folder: "gemma4-vl", merge: 3, tolerances: [5e-4, 5e-4], given_rows: false });
}

#[test]
fn gemma4_unified_has_the_references_rows_and_logits() {
    check(&Case { folder: "gemma4-unified", merge: 1, tolerances: [1e-4, 5e-4], given_rows: false });
}

#[test]
fn lfm3_vl_has_the_references_rows_and_logits() {
    check(&Case { folder: "lfm3-vl", ..QWEN3_VL });
}

/// Pictures of equal size share a pass.
#[test]
fn pictures_encoded_at_once_keep_their_rows() {
    let Some(folder) = QWEN3_VL.path() else { return };
    let references = References::open(&folder.join("refs.safetensors"));
    let first = QWEN3_VL.tiles(&references, 0, false).swap_remove(0);
    let second = Patches { values: first.values.iter().rev().copied().collect(), ..first.clone() };
    for device in devices() {
        let encoder = VisionEncoder::load(&device, &folder, VisionOptions::default()).unwrap();
        let rows = |image: Result<ImageRows, Error>| image.unwrap().rows;
        let want = [&first, &second].map(|patches| rows(block_on(encoder.encode_patches(patches))));
        let got = block_on(both(encoder.encode_patches(&first), encoder.encode_patches(&second))).map(rows);
        assert!(want[0][1] != want[1][1], "deepstack rows differ between the pictures");
        assert!(got == want, "{} ({})", device.info().name, device.tier().name());
    }
}

/// A feature of an encoder or of the text model, and how to do without.
type Feature = (&'static str, fn(&mut VisionConfig, &mut ModelConfig));

fn every_block(config: &mut ModelConfig, change: fn(&mut tilewright::model::Block)) {
    config.blocks.iter_mut().for_each(change);
}

const UNTURNED: Feature = ("rotation of patches", |vision, _| {
    every_block(&mut vision.encoder, |block| block.attention.rope = None);
});
const UNPLACED: Feature = ("learned positions", |vision, _| vision.has_positions = false);
const ONE_WAY: Feature = ("attention both ways", |vision, _| vision.encoder.causal = true);

const FEATURES: [(Case, &[Feature]); 8] = [
    (
        QWEN3_VL,
        &[
            UNTURNED,
            UNPLACED,
            ONE_WAY,
            ("the order of further layers", |vision, _| vision.deepstack.reverse()),
            ("M-RoPE", |vision, _| vision.has_grid = false),
        ],
    ),
    (Case { folder: "qwen35-vl", ..QWEN3_VL }, &[UNTURNED, UNPLACED, ONE_WAY]),
    (Case { folder: "lfm2-vl", ..QWEN3_VL }, &[UNPLACED, ONE_WAY]),
    (Case { folder: "smolvlm", ..QWEN3_VL }, &[UNPLACED, ONE_WAY]),
    (
        Case { folder: "gemma3-vl", ..QWEN3_VL },
        &[
            UNPLACED,
            ONE_WAY,
            ("rows that see each other", |_, text| {
                every_block(text, |block| block.attention.bidirectional_images = false);
            }),
            ("windows", |_, text| every_block(text, |block| block.attention.window = None)),
        ],
    ),
    (
        Case { folder: "gemma4-vl", merge: 3, tolerances: [5e-4; 2], given_rows: false },
        &[
            UNTURNED,
            UNPLACED,
            ONE_WAY,
            ("windows", |_, text| every_block(text, |block| block.attention.window = None)),
            ("scale of the scores", |vision, _| {
                every_block(&mut vision.encoder, |block| block.attention.scale = 0.25);
            }),
        ],
    ),
    (
        Case { folder: "gemma4-unified", merge: 1, tolerances: [1e-4, 5e-4], given_rows: false },
        &[UNPLACED, ("rows that see each other in all layers", |vision, _| vision.attention = RowAttention::ByLayer)],
    ),
    (Case { folder: "lfm3-vl", ..QWEN3_VL }, &[UNTURNED, ONE_WAY]),
];

/// The largest differences of rows and of logits after the first case's pictures.
fn differences(case: &Case, change: fn(&mut VisionConfig, &mut ModelConfig)) -> Option<[f32; 2]> {
    let folder = case.path()?;
    let references = References::open(&folder.join("refs.safetensors"));
    let device = common::cpu();
    let (mut vision, mut text) = (VisionFile::open(&folder).unwrap(), ModelFile::open(&folder).unwrap());
    let ModelShape::Decoder(config) = &mut text.header.shape else { panic!("a decoder") };
    change(&mut vision.config, config);
    let encoder = VisionEncoder::from_file(&device, vision, VisionOptions::default()).unwrap();
    let options = LoadOptions { kv_type: KvType::F32, exact: true, ..LoadOptions::default() };
    let model = Model::from_file(&device, text, options).unwrap();
    let tiles = case.tiles(&references, 0, false);
    let images: Vec<ImageRows> =
        tiles.iter().map(|patches| block_on(encoder.encode_patches(patches)).unwrap()).collect();
    let rows: Vec<f32> = images.iter().flat_map(|image| image.rows[0].clone()).collect();
    let images: Vec<_> = images.into_iter().map(Arc::new).collect();
    let of_rows = largest_difference(&rows, &references.floats("0.image_embeds"));
    Some([of_rows, logits_after(&model, (&references, 0), &images)])
}

#[test]
fn turning_off_any_vision_feature_changes_rows_or_logits() {
    for (case, features) in FEATURES {
        for (feature, turn_off) in features {
            let Some(differences) = differences(&case, *turn_off) else { return };
            println!(
                "{} without {feature}: rows off by {:.1e}, logits by {:.1e}",
                case.folder, differences[0], differences[1]
            );
            let is_seen = differences.iter().zip(case.tolerances).any(|(found, tolerance)| *found > 2.0 * tolerance);
            assert!(is_seen, "{} without {feature}: {differences:?}", case.folder);
        }
    }
}

#[test]
fn planned_memory_is_what_a_picture_allocates() {
    for case in [QWEN3_VL, Case { folder: "gemma4-vl", merge: 3, ..QWEN3_VL }] {
        let Some(folder) = case.path() else { return };
        let references = References::open(&folder.join("refs.safetensors"));
        let device = Device::cpu();
        let encoder = VisionEncoder::load(&device, &folder, VisionOptions::default()).unwrap();
        let patches = case.tiles(&references, 0, false).swap_remove(0);
        let planned = encoder.plan(patches.places.len() as u32).unwrap().total_bytes();
        let before = device.counters();
        block_on(encoder.encode_patches(&patches)).unwrap();
        let allocated = (device.counters() - before).bytes_allocated;
        println!("{}: planned {planned} bytes, allocated {allocated}", case.folder);
        assert!(allocated.abs_diff(planned) * 10 <= planned, "{}: {allocated}, planned {planned}", case.folder);
    }
}

/// Folders of the larger Gemma 4: means of patches are standardised. Compared with the formula in f64, from the last
/// layer's output.
#[test]
fn standardised_means_match_their_formula() {
    let case = Case { folder: "gemma4-vl", merge: 3, ..QWEN3_VL };
    let Some(source) = case.path() else { return };
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("gemma4-vl-standardised");
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::copy(source.join("preprocessor_config.json"), folder.join("preprocessor_config.json")).unwrap();
    let config = std::fs::read_to_string(source.join("config.json")).unwrap();
    let mut config: serde_json::Value = serde_json::from_str(&config).unwrap();
    let vision = &mut config["vision_config"];
    let (dim, eps) = (48, vision["rms_norm_eps"].as_f64().unwrap());
    // As published files have them.
    vision["standardize"] = true.into();
    vision["rope_parameters"]["rope_type"] = "default".into();
    vision["default_output_length"] = 280.into();
    vision["global_head_dim"] = vision["head_dim"].clone();
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
    let file = std::fs::read(source.join("model.safetensors")).unwrap();
    let names = ["std_bias", "std_scale"].map(|name| format!("model.vision_tower.{name}"));
    let standard = [0.75, 1.5].map(|first: f32| (0..dim).map(|i| first + (i as f32 * 0.7).sin()).collect::<Vec<f32>>());
    std::fs::write(folder.join("model.safetensors"), with_vectors(&file, &names, &standard)).unwrap();
    let projection = bf16(&file, "model.embed_vision.embedding_projection.weight");
    let references = References::open(&source.join("refs.safetensors"));
    let patches = case.tiles(&references, 0, false).swap_remove(0);
    for device in devices() {
        let encoder = VisionEncoder::load(&device, &folder, VisionOptions::default()).unwrap();
        let last = block_on(encoder.trace(&patches)).unwrap().pop().unwrap();
        let rows = block_on(encoder.encode_patches(&patches)).unwrap();
        let want = last.chunks_exact(9 * dim).flat_map(|block| {
            let column = |i: usize| block.iter().skip(i).step_by(dim).map(|&x| f64::from(x)).sum::<f64>() / 9.0;
            let of_column = |i: usize| {
                let [bias, scale] = standard.each_ref().map(|vector| f64::from(vector[i]));
                (column(i) * (dim as f64).sqrt() - bias) * scale
            };
            let row: Vec<f64> = (0..dim).map(of_column).collect();
            let square = row.iter().map(|x| x * x).sum::<f64>() / dim as f64;
            let normed: Vec<f64> = row.iter().map(|x| x / (square + eps).sqrt()).collect();
            let product = |w: &[f32]| w.iter().zip(&normed).map(|(&w, x)| f64::from(w) * x).sum::<f64>() as f32;
            projection.chunks_exact(dim).map(product).collect::<Vec<f32>>()
        });
        let difference = largest_difference(&rows.rows[0], &want.collect::<Vec<f32>>());
        println!("{} ({}): rows within {difference:.1e}", device.info().name, device.tier().name());
        assert!(difference <= 1e-5, "{} ({}): {difference}", device.info().name, device.tier().name());
    }
}

/// A safetensors file with further vectors.
fn with_vectors(file: &[u8], names: &[String], vectors: &[Vec<f32>]) -> Vec<u8> {
    let n = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    let mut header: serde_json::Value = serde_json::from_slice(&file[8..8 + n]).unwrap();
    let mut data = file[8 + n..].to_vec();
    for (name, vector) in names.iter().zip(vectors) {
        let start = data.len();
        data.extend(vector.iter().flat_map(|value| value.to_le_bytes()));
        header[name] =
            serde_json::json!({"dtype": "F32", "shape": [vector.len()], "data_offsets": [start, data.len()]});
    }
    let header = header.to_string();
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &data].concat()
}

/// The numbers of a BF16 tensor.
fn bf16(file: &[u8], name: &str) -> Vec<f32> {
    let header = tilewright::formats::safetensors::Safetensors::parse(file, file.len() as u64).unwrap();
    let bytes = header.tensor(name).unwrap().bytes(file).unwrap();
    bytes.chunks_exact(2).map(|b| f32::from_bits(u32::from(u16::from_le_bytes([b[0], b[1]])) << 16)).collect()
}

/// A matrix of patches above the size in which weights are uploaded piece by piece: files have more dimensions than two.
#[test]
fn large_patches_are_uploaded_whole() {
    const SIDE: u32 = 64;
    let Some(folder) = QWEN3_VL.path() else { return };
    let file = std::fs::read(folder.join("mmproj-bf16.gguf")).unwrap();
    let gguf = Gguf::parse(&file, file.len() as u64).unwrap();
    let mut header = GgufHeader::new(32);
    for (key, value) in gguf.metadata.iter() {
        match (key, value) {
            ("clip.vision.patch_size", _) => header.set(key, Value::U32(SIDE)).unwrap(),
            (_, Value::Array(array)) => {
                let kind = if key.contains("deepstack") { ValueType::Bool } else { ValueType::F32 };
                header.set_array(key, kind, array.iter().collect::<Vec<_>>().into_iter()).unwrap();
            }
            (_, value) => header.set(key, value).unwrap(),
        }
    }
    let (dim, width) = (32, 3 * SIDE * SIDE);
    let mut rng = common::Rng::new(7);
    let weight: Vec<f32> = (0..dim * width).map(|_| rng.normal() as f32 / (width as f32).sqrt()).collect();
    let is_patches = |name: &str| name.starts_with("v.patch_embd.weight");
    let kept: Vec<_> = gguf.tensors.iter().filter(|tensor| !tensor.name.ends_with("weight.1")).collect();
    for tensor in &kept {
        let shape = [u64::from(dim), 3, u64::from(SIDE), u64::from(SIDE)];
        let shape = if is_patches(&tensor.name) { &shape[..] } else { &tensor.shape };
        header.add_tensor(&tensor.name, shape, tensor.block_type).unwrap();
    }
    let mut written = header.to_bytes();
    for tensor in &kept {
        match is_patches(&tensor.name) {
            true => written.extend_from_slice(bytemuck::cast_slice(&weight)),
            false => written.extend_from_slice(tensor.bytes(&file).unwrap()),
        }
        written.resize(written.len().next_multiple_of(32), 0);
    }
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("large-patches-mmproj.gguf");
    std::fs::write(&path, written).unwrap();
    let encoder = VisionEncoder::load(&common::cpu(), &path, VisionOptions::default()).unwrap();
    let grid = [2, 2];
    let embedded = |values: Vec<f32>| {
        let patches = Patches { values, patch_dim: width, grid, places: QWEN3_VL.places(grid) };
        block_on(encoder.trace(&patches)).unwrap().swap_remove(0)
    };
    let values: Vec<f32> = (0..4 * width).map(|_| rng.normal() as f32).collect();
    // Without bias and positions.
    let zero = embedded(vec![0.0; values.len()]);
    let got: Vec<f32> = embedded(values.clone()).iter().zip(zero).map(|(with, without)| with - without).collect();
    let mut want = Vec::new();
    for patch in values.chunks_exact(width as usize) {
        for row in weight.chunks_exact(width as usize) {
            want.push(row.iter().zip(patch).map(|(&w, &x)| f64::from(w) * f64::from(x)).sum::<f64>() as f32);
        }
    }
    let difference = largest_difference(&got, &want);
    assert!(difference <= 2e-5, "{difference}");
}
