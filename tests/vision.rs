//! Models that take pictures against transformers' references: vision encoders layer by layer, rows of pictures in a
//! text, logits and greedy continuations. Pixels are given; those from files are compared in `picture.rs`.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use tilewright::engine::{Engine, EngineOptions, Request};
use tilewright::kernels::KvType;
use tilewright::picture::Patches;
use tilewright::{Device, GenerateOptions, ImageRows, LoadOptions, Model, VisionEncoder, VisionOptions};

use crate::common::shared::{self, executors};
use crate::common::{self, References, block_on, largest_difference};
use tilewright::Tier;

/// The token that stands for a row of a picture in the references.
const ROW: u32 = 287;

/// A model with references.
struct Case {
    folder: &'static str,
    /// Largest difference of rows and hidden values of the encoder, and of logits.
    tolerances: [f32; 2],
}

const QWEN3_VL: Case = Case { folder: "qwen3-vl", tolerances: [1e-4, 2e-4] };
/// Delta rules over unscaled random weights.
const QWEN35_VL: Case = Case { folder: "qwen35-vl", tolerances: [1e-4, 3e-3] };

impl Case {
    fn path(&self) -> Option<PathBuf> {
        Some(common::data(&["tiny-random-pictures"])?.join("tiny-random-pictures").join(self.folder))
    }

    /// The folder and the GGUF files: text model and vision encoder.
    fn files(&self, folder: &Path) -> Vec<[PathBuf; 2]> {
        let gguf = ["model-bf16.gguf", "mmproj-bf16.gguf"].map(|name| folder.join(name));
        let folder = [folder.to_path_buf(), folder.to_path_buf()];
        [folder, gguf].into_iter().filter(|files| files.iter().all(|path| path.exists())).collect()
    }
}

/// Devices that all cases run on.
fn devices() -> Vec<Device> {
    executors().into_iter().chain(shared::gpus_beside_cpu([Tier::Baseline])).collect()
}

/// The patches of a case's picture `i`, from the pixels that the processor gave, and their number of merged rows.
fn patches(references: &References, case: usize, merge: u32) -> Patches {
    let values = references.floats(&format!("{case}.pixel_values"));
    let grid: Vec<u32> = references.ids(&format!("{case}.image_grid_thw"));
    let (rows, columns) = (grid[1], grid[2]);
    let n = (rows * columns) as usize;
    let width = values.len() / n;
    // Two equal frames of each channel.
    let pixels = width / 6;
    let halved = values.chunks_exact(2 * pixels).flat_map(|frames| frames[..pixels].to_vec()).collect();
    let blocks = (0..rows / merge).flat_map(|row| (0..columns / merge).map(move |column| [row * merge, column * merge]));
    let places = blocks.flat_map(|[row, column]| {
        (0..merge).flat_map(move |r| (0..merge).map(move |c| [row + r, column + c]))
    });
    Patches { values: halved, patch_dim: width as u32 / 2, grid: [rows, columns], places: places.collect() }
}

/// The ids of a case with those of the image in place of [`ROW`].
fn placed(ids: &[u32], image: &ImageRows) -> Vec<u32> {
    let mut rows = image.ids.clone();
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
            let images = [0, 1].map(|i| check_encoder(case, &encoder, (&references, i), &what));
            check_text(case, &load(&device, &text), (&references, &images), &what);
            common::assert_tested(&device);
        }
    }
}

fn check_encoder(case: &Case, encoder: &VisionEncoder, (references, i): (&References, usize), what: &str) -> Arc<ImageRows> {
    let patches = patches(references, i, 2);
    let [tolerance, _] = case.tolerances;
    if i == 0 {
        let layers = block_on(encoder.trace(&patches)).unwrap().concat();
        let difference = largest_difference(&layers, &references.floats("0.vision_layers"));
        assert!(difference <= tolerance, "{what}: layers differ by {difference}");
    }
    let image = block_on(encoder.encode_patches(&patches)).unwrap();
    let want = references.floats(&format!("{i}.image_embeds"));
    let difference = largest_difference(&image.rows[0], &want);
    println!("{what}: rows of picture {i} within {difference:.1e}");
    assert!(difference <= tolerance, "{what}: rows differ by {difference}");
    if image.rows.len() > 1 {
        let difference = largest_difference(&image.rows[1..].concat(), &references.floats(&format!("{i}.deepstack")));
        assert!(difference <= tolerance, "{what}: deepstack rows differ by {difference}");
    }
    Arc::new(image)
}

fn check_text(case: &Case, model: &Model, (references, images): (&References, &[Arc<ImageRows>; 2]), what: &str) {
    let [_, tolerance] = case.tolerances;
    for (i, image) in images.iter().enumerate() {
        let ids = placed(&references.ids(&format!("{i}.ids")), image);
        let want = match i {
            0 => references.floats("0.logits"),
            _ => references.floats(&format!("{i}.last_logits")),
        };
        let rows: Vec<&[f32]> = want.chunks_exact(model.config().vocab_size as usize).collect();
        // The tokens after the picture: the first in one pass with it, the others one by one.
        let n_after = ids.iter().rev().take_while(|&&id| id < ROW).count().min(rows.len());
        let mut session = model.session().unwrap();
        session.set_images(&[image.clone()]).unwrap();
        let mut worst = 0.0f32;
        for (at, want) in (ids.len() - n_after..).zip(&rows[rows.len() - n_after..]) {
            let next = if session.tokens().is_empty() { &ids[..=at] } else { &ids[at..=at] };
            let logits = block_on(session.logits(next)).unwrap();
            worst = worst.max(largest_difference(&logits, want));
        }
        println!("{what}: logits after picture {i} within {worst:.1e}");
        assert!(worst <= tolerance, "{what}: logits after picture {i} differ by {worst}");
    }
    let case = references.ids("greedy.case")[0] as usize;
    let ids = placed(&references.ids(&format!("{case}.ids")), &images[case]);
    let want = references.ids("greedy.ids");
    let margins = references.floats("greedy.margins");
    let certain = margins.iter().position(|&margin| margin < 2.0 * tolerance).unwrap_or(want.len());
    let options = GenerateOptions { ignore_eos: true, ..GenerateOptions::greedy(want.len()) };
    let mut session = model.session().unwrap();
    session.set_images(&images[case..=case]).unwrap();
    let mut generation = session.generate_ids(&ids, &options).unwrap();
    let mut got = Vec::new();
    while let Some(piece) = block_on(generation.next()) {
        got.push(piece.unwrap().id);
    }
    assert_eq!(got[..certain], want[..certain], "{what}");
    // The engine: cold, then with a cached prefix, beside another picture's text.
    let engine = Engine::spawn(model, &EngineOptions::default()).unwrap();
    let request = |ids: &[u32], image: &Arc<ImageRows>| Request {
        images: vec![image.clone()],
        ..Request::new(ids.to_vec(), options.clone())
    };
    let other = placed(&references.ids("1.ids"), &images[1]);
    for _ in 0..2 {
        let streams = [request(&ids, &images[case]), request(&other, &images[1])].map(|r| engine.submit(r).unwrap());
        let [answer, _] = streams.map(|stream| ids_of(stream));
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
    check(&QWEN35_VL);
}
