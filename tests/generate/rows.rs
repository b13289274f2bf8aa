//! Models with token tables on disk, read row by row: bit-identical to all-in-memory models.

use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use tilewright::formats::gguf::{Value, ValueType};
use tilewright::formats::gguf_writer::GgufHeader;
use tilewright::formats::quantize::quantize_row;
use tilewright::formats::{BlockType, Gguf};
use tilewright::generate::{BeamOptions, ContextPolicy};
use tilewright::load::ModelFile;
use tilewright::load::convert::{QuantizeOptions, quantize_file};
use tilewright::{Device, Error, GenerateOptions, LoadOptions, Model, Session};

use super::common::{self, Rng, block_on, cpu, is_full};
use super::{collect, endless};

/// Gemma 4's second table, with 16 elements per row for each of six layers.
const PER_LAYER: &str = "per_layer_token_embd.weight";
const VOCAB: u32 = 300;

/// The first adapter, shared by these tests: separate handles would compile their own pipelines.
fn gpu() -> Option<Device> {
    static GPU: LazyLock<Option<Device>> = LazyLock::new(|| common::executors().into_iter().find(Device::is_gpu));
    GPU.clone()
}

fn devices() -> impl Iterator<Item = Device> {
    std::iter::once(cpu()).chain(gpu())
}

/// A test's folder, removed on drop.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("rows-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Folder(path)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn tiny(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tiny-random").join(path)
}

/// A tiny model with Q8_0 matrices, like most here, so that they share pipelines.
fn in_q8_0(folder: &Folder, path: &str) -> PathBuf {
    let output = folder.path(&path.replace('/', "-"));
    quantize_file(&tiny(path), &output, &QuantizeOptions::new(BlockType::Q8_0), &mut |_, _, _| ()).unwrap();
    output
}

/// Writes a random Llama with an untied head: four layers of this width, a token table of this type, and other
/// matrices in Q8_0.
fn untied(folder: &Folder, table: BlockType, width: u64) -> PathBuf {
    let mut rng = Rng::new(11);
    let mut header = GgufHeader::new(32);
    let heads = (width / 32) as u32;
    for (key, value) in [
        ("general.architecture", Value::Str("llama")),
        ("llama.embedding_length", Value::U32(width as u32)),
        ("llama.feed_forward_length", Value::U32(64)),
        ("llama.block_count", Value::U32(4)),
        ("llama.attention.head_count", Value::U32(heads)),
        ("llama.attention.head_count_kv", Value::U32(heads)),
        ("llama.attention.layer_norm_rms_epsilon", Value::F32(1e-5)),
        ("llama.context_length", Value::U32(128)),
        ("llama.rope.freq_base", Value::F32(10_000.0)),
        ("tokenizer.ggml.model", Value::Str("none")),
    ] {
        header.set(key, value).unwrap();
    }
    let tokens: Vec<String> = (0..VOCAB).map(|i| format!("t{i}")).collect();
    header.set_array("tokenizer.ggml.tokens", ValueType::String, tokens.iter().map(|token| Value::Str(token))).unwrap();
    let vocab = u64::from(VOCAB);
    let mut tensors = vec![
        ("token_embd".to_owned(), vec![vocab, width], table),
        ("output".to_owned(), vec![vocab, width], BlockType::Q8_0),
    ];
    for layer in 0..4 {
        for (name, rows, cols) in [
            ("attn_q", width, width),
            ("attn_k", width, width),
            ("attn_v", width, width),
            ("attn_output", width, width),
            ("ffn_gate", 64, width),
            ("ffn_up", 64, width),
            ("ffn_down", width, 64),
        ] {
            tensors.push((format!("blk.{layer}.{name}"), vec![rows, cols], BlockType::Q8_0));
        }
        for name in ["attn_norm", "ffn_norm"] {
            tensors.push((format!("blk.{layer}.{name}"), vec![width], BlockType::F32));
        }
    }
    tensors.push(("output_norm".to_owned(), vec![width], BlockType::F32));
    let mut data = Vec::new();
    for (name, shape, block_type) in tensors {
        let size = header.add_tensor(&format!("{name}.weight"), &shape, block_type).unwrap() as usize;
        let n_rows: u64 = shape[..shape.len() - 1].iter().product();
        let row: Vec<f32> = vec![0.0; shape[shape.len() - 1] as usize];
        for _ in 0..n_rows {
            let row: Vec<f32> =
                row.iter().map(|_| rng.normal() as f32 * if shape.len() == 1 { 1.0 } else { 0.2 }).collect();
            let mut packed = vec![0; size / n_rows as usize];
            quantize_row(block_type, &row, None, &mut packed).unwrap();
            data.extend(packed);
        }
        data.resize(data.len() + header.padding(data.len() as u64), 0);
    }
    let path = folder.path(&format!("{table}-{width}.gguf"));
    std::fs::write(&path, [header.to_bytes(), data].concat()).unwrap();
    path
}

/// Tables of all kinds, by file and tensor name, some with rows that begin within a word of tails.
fn tables(folder: &Folder) -> Vec<(PathBuf, &'static str)> {
    let mut tables =
        vec![(tiny("gemma4/model-bf16.gguf"), PER_LAYER), (in_q8_0(folder, "gemma4/model-bf16.gguf"), PER_LAYER)];
    for (table, width) in [
        (BlockType::F16, 96),
        (BlockType::Q8_0, 96),
        (BlockType::Q4_0, 96),
        (BlockType::Q6_K, 256),
        (BlockType::F32, 96),
    ] {
        tables.push((untied(folder, table, width), "token_embd.weight"));
    }
    tables
}

/// All of them on the CPU; on a GPU one of two tables, one with rows that share words, and one of super-blocks.
fn of_kinds<'a>(
    tables: &'a [(PathBuf, &'static str)],
    device: &Device,
) -> impl Iterator<Item = (&'a Path, &'static str)> {
    let all = is_full() || !device.is_gpu();
    let is_enough = |name: &str| ["gemma4-model-bf16.gguf", "Q4_0-96.gguf", "Q6_K-256.gguf"].contains(&name);
    let chosen = tables
        .iter()
        .filter(move |(path, _)| all || path.file_name().is_some_and(|name| is_enough(&name.to_string_lossy())));
    chosen.map(|(path, table)| (path.as_path(), *table))
}

fn options() -> LoadOptions<'static> {
    LoadOptions { context_length: Some(64), max_pass: Some(8), ..LoadOptions::default() }
}

fn fetching() -> LoadOptions<'static> {
    LoadOptions { stream_rows: true, ..options() }
}

fn load(device: &Device, path: &Path, options: LoadOptions<'_>) -> Model {
    Model::load(device, path, options).unwrap_or_else(|error| panic!("{error}"))
}

/// Logits of prompts of one, several and many tokens, and greedy tokens after them.
fn told(session: &mut Session) -> (Vec<Vec<f32>>, Vec<u32>) {
    let ids = |n: u32| (0..n).map(|i| (i * i + 7 * i + 3) % 290).collect::<Vec<u32>>();
    let mut logits = Vec::new();
    for n in [1, 3, 21] {
        session.clear();
        logits.push(block_on(session.logits(&ids(n))).unwrap());
    }
    let (tokens, ..) = collect(session.generate_ids(&[5, 6], &endless(12)).unwrap());
    (logits, tokens)
}

/// Bytes of a table on a device, equal to those in the file: its tails and units.
fn table_bytes(path: &Path, name: &str) -> u64 {
    let bytes = std::fs::read(path).unwrap();
    let gguf = Gguf::parse(&bytes, bytes.len() as u64).unwrap();
    gguf.tensor(name).unwrap().size_bytes.next_multiple_of(16)
}

#[test]
fn fetched_rows_are_bit_equal_and_free_the_tables_memory() {
    let folder = Folder::new("bits");
    let tables = tables(&folder);
    for device in devices() {
        for (path, table) in of_kinds(&tables, &device) {
            let case = format!("{} on {}", path.display(), device.info().name);
            // Excludes allocations of the self-test.
            drop(load(&device, path, options()));
            let allocated = |options| {
                let before = device.counters();
                let model = load(&device, path, options);
                let mut session = model.session().unwrap();
                let told = told(&mut session);
                let bytes = (device.counters() - before).bytes_allocated;
                drop(session);
                (model, told, bytes)
            };
            let (whole, want, whole_bytes) = allocated(options());
            assert!(whole.streaming().is_none());
            let (model, got, bytes) = allocated(fetching());
            assert!(got == want, "{case}");
            let streaming = model.streaming().unwrap();
            assert_eq!((streaming.n_streamed, streaming.tables_bytes), (0, table_bytes(path, table)), "{case}");
            // Three prompts and two tokens more; all tokens but the last are computed.
            assert_eq!(streaming.n_rows_read, 1 + 3 + 21 + 2 + 11, "{case}");
            // Weights exclude the table; a pass's rows and their numbers are counted beside the activations.
            let (plan, whole_plan) = (model.plan(), whole.plan());
            assert_eq!(whole_plan.weights_bytes - plan.weights_bytes, streaming.tables_bytes, "{case}");
            assert_eq!(whole_plan.cache_bytes, plan.cache_bytes, "{case}");
            let row_bytes = streaming.tables_bytes / u64::from(model.config().vocab_size);
            let room = 8 * row_bytes + 4 * 64;
            let more = plan.activations_bytes - whole_plan.activations_bytes;
            assert!((room..room + 48).contains(&more), "{case}: {more} bytes more, {room} expected");
            let saved = whole_plan.total_bytes() - plan.total_bytes();
            println!("{case}: {bytes} of {whole_bytes} bytes allocated, {saved} fewer planned");
            // A GPU's pool may already hold some buffers.
            assert!(device.is_gpu() || whole_bytes - bytes == saved, "{case}");
            assert_eq!(Model::plan_file(&device.target(), &ModelFile::open(path).unwrap(), &fetching()).unwrap(), plan);
            assert_eq!(
                model.session().unwrap().decode_dispatches(),
                whole.session().unwrap().decode_dispatches(),
                "{case}"
            );
            let ids: Vec<u32> = (0..21).map(|i| 13 * i % 290).collect();
            let (trace, want) = (block_on(model.trace(&ids)).unwrap(), block_on(whole.trace(&ids)).unwrap());
            assert!(trace.hidden == want.hidden && trace.logits == want.logits, "{case}");
        }
    }
}

/// If memory is short, tables are offloaded to disk first, then layers.
#[test]
fn tables_are_offloaded_before_layers() {
    let folder = Folder::new("limits");
    let tables = tables(&folder);
    for device in devices() {
        // On a GPU the first one suffices.
        let n = if is_full() || !device.is_gpu() { usize::MAX } else { 1 };
        for (path, _) in of_kinds(&tables, &device).take(n) {
            let case = format!("{} on {}", path.display(), device.info().name);
            let whole = load(&device, path, options());
            let want = told(&mut whole.session().unwrap());
            let rows_bytes = load(&device, path, fetching()).plan().total_bytes();
            let within = |memory_limit, stream_layers| {
                let options = LoadOptions { memory_limit: Some(memory_limit), stream_layers, ..options() };
                Model::load(&device, path, options)
            };
            let all_bytes = whole.plan().total_bytes();
            assert!(within(all_bytes, true).unwrap().streaming().is_none(), "{case}: a model that fits is touched");
            for limit in [all_bytes - 1, rows_bytes] {
                let model = within(limit, true).unwrap();
                let streaming = model.streaming().unwrap();
                assert!(streaming.n_streamed == 0 && streaming.tables_bytes > 0, "{case}: {streaming:?}");
                assert_eq!(model.plan().total_bytes(), rows_bytes, "{case}");
                assert!(told(&mut model.session().unwrap()) == want, "{case}");
            }
            // The longest context that fits without the tables, if no useful one fits with them.
            let options = LoadOptions { context_length: None, fit_context: true, stream_layers: true, ..options() };
            let fitted = load(&device, path, LoadOptions { memory_limit: Some(all_bytes - 1), ..options });
            let streaming = fitted.streaming().unwrap();
            assert!(streaming.n_streamed == 0 && streaming.tables_bytes > 0, "{case}: {streaming:?}");
            assert!(fitted.context_length() >= 64, "{case}: {}", fitted.context_length());
            let model = within(rows_bytes - 1, true).unwrap();
            let streaming = model.streaming().unwrap();
            assert!(streaming.n_streamed > 0 && streaming.tables_bytes > 0, "{case}: {streaming:?}");
            assert!(model.plan().total_bytes() < rows_bytes, "{case}");
            assert!(told(&mut model.session().unwrap()) == want, "{case}");
            for (limit, stream_layers) in [(all_bytes - 1, false), (1000, true)] {
                let refused = within(limit, stream_layers).map(drop);
                assert!(matches!(refused, Err(Error::Memory { .. })), "{case}: {refused:?}");
            }
        }
    }
}

/// All other features of a session work as before, with the same output.
#[test]
fn session_operations_are_equal_with_fetched_rows() {
    let folder = Folder::new("sessions");
    let paths = [in_q8_0(&folder, "gemma4/model-bf16.gguf"), untied(&folder, BlockType::Q8_0, 96)];
    for device in devices() {
        // On a GPU one of them suffices.
        let n = if is_full() || !device.is_gpu() { 2 } else { 1 };
        for path in &paths[..n] {
            let case = format!("{} on {}", path.display(), device.info().name);
            let [whole, rows] = [options(), fetching()].map(|options| load(&device, path, options));
            let ids = [5, 6, 7, 5, 6, 7, 5, 6];
            let texts = |model: &Model| {
                let mut texts = Vec::new();
                let mut run = |options: GenerateOptions| {
                    let mut session = model.session().unwrap();
                    texts.push(collect(session.generate_ids(&ids, &options).unwrap()).0);
                    session
                };
                run(GenerateOptions { temperature: 0.9, seed: Some(3), repeat_penalty: 1.2, ..endless(20) });
                run(GenerateOptions { logprobs: Some(3), ..endless(9) });
                run(GenerateOptions { prompt_lookup: 4, ..endless(30) });
                // Past the end of the context, after which its latter half is recomputed.
                run(GenerateOptions { context_policy: ContextPolicy::Slide, ..endless(90) });
                let mut session = run(endless(10));
                session.truncate(9);
                texts.push(collect(session.generate_ids(&[8, 9], &endless(6)).unwrap()).0);
                let snapshot = session.snapshot().unwrap();
                texts.push(collect(session.generate_ids(&[1], &endless(6)).unwrap()).0);
                session.restore(&snapshot).unwrap();
                texts.push(collect(session.generate_ids(&[2, 3], &endless(6)).unwrap()).0);
                let mut draft = whole.session().unwrap();
                let mut generation = session.generate_ids(&[4], &endless(9)).unwrap();
                generation.draft_with(&mut draft, 4).unwrap();
                texts.push(collect(generation).0);
                let mut generation = session.generate_ids(&[4], &endless(5)).unwrap();
                generation.enable_profile();
                texts.push(collect(generation).0);
                let options = BeamOptions { width: 3, max_tokens: 6, ignore_eos: true, ..BeamOptions::default() };
                texts.extend(block_on(model.beam_search(&ids, &options)).unwrap().into_iter().map(|beam| beam.ids));
                texts
            };
            assert_eq!(texts(&rows), texts(&whole), "{case}");

            // Two alternating sessions do not share rows.
            let (mut first, mut second) = (rows.session().unwrap(), rows.session().unwrap());
            let mut generations = [
                first.generate_ids(&[9, 3], &endless(8)).unwrap(),
                second.generate_ids(&[200, 4, 1], &endless(8)).unwrap(),
            ];
            let mut got = [Vec::new(), Vec::new()];
            for _ in 0..8 {
                for (generation, got) in generations.iter_mut().zip(&mut got) {
                    got.push(block_on(generation.next()).unwrap().unwrap().id);
                }
            }
            let alone = |ids: &[u32]| collect(whole.session().unwrap().generate_ids(ids, &endless(8)).unwrap()).0;
            assert_eq!(got, [alone(&[9, 3]), alone(&[200, 4, 1])], "{case}");

            // A session file fits equal weights anywhere.
            for (from, to) in [(&whole, &rows), (&rows, &whole)] {
                let mut session = from.session().unwrap();
                collect(session.generate_ids(&ids, &endless(10)).unwrap());
                let bytes = block_on(session.to_bytes("")).unwrap();
                let mut reopened = to.session().unwrap();
                reopened.restore_bytes(&bytes).unwrap();
                let [want, got] =
                    [&mut session, &mut reopened].map(|s| collect(s.generate_ids(&[7], &endless(8)).unwrap()).0);
                assert_eq!(got, want, "{case}");
            }
        }
    }
}

/// A LoRA adapter on a model with its table on disk.
#[cfg(feature = "lora")]
#[test]
fn lora_adapters_work_with_offloaded_tables() {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data");
    let [whole, rows] = [options(), fetching()].map(|options| {
        let model = load(&cpu(), &data.join("tiny-random/qwen3"), options);
        let adapter = model.load_adapter(data.join("tiny-random-lora/qwen3"), 1.0).unwrap();
        let mut session = model.with_adapter(Some(&adapter)).unwrap().session().unwrap();
        let with = told(&mut session);
        session.set_adapter(None).unwrap();
        let without = told(&mut session);
        assert!(with != without);
        (model.streaming().is_some(), [with, without])
    });
    assert_eq!([whole.0, rows.0], [false, true]);
    assert!(rows.1 == whole.1);
}

/// If the CPU computes the first layers, it holds the embedding and reads its rows.
#[test]
fn cpu_part_of_a_split_model_fetches_rows() {
    let Some(gpu) = gpu() else { return };
    let folder = Folder::new("split");
    for path in [untied(&folder, BlockType::Q8_0, 96), in_q8_0(&folder, "llama3-rope/model-f16.gguf")] {
        let [want, got] = [options(), fetching()].map(|options| {
            let model = load(&gpu, &path, LoadOptions { gpu_layers: Some(1), ..options });
            let plan = model.placement().unwrap()[0].plan;
            (told(&mut model.session().unwrap()), plan, model)
        });
        assert!(got.0 == want.0, "{}", path.display());
        let streaming = got.2.streaming().unwrap();
        assert_eq!(streaming.tables_bytes, table_bytes(&path, "token_embd.weight"));
        assert_eq!(want.1.weights_bytes - got.1.weights_bytes, streaming.tables_bytes);
        assert_eq!(got.2.plan(), want.2.plan());
        // Equal weights.
        let mut session = got.2.session().unwrap();
        collect(session.generate_ids(&[3], &endless(5)).unwrap());
        let bytes = block_on(session.to_bytes("")).unwrap();
        want.2.session().unwrap().restore_bytes(&bytes).unwrap();
    }
}

/// The head reads its whole matrix, so a tied embedding stays on the device.
#[test]
fn tied_embedding_table_stays_on_the_device() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/stories.gguf");
    let [whole, rows] = [options(), fetching()].map(|options| load(&cpu(), &path, options));
    assert!(rows.streaming().is_none());
    assert_eq!(rows.plan(), whole.plan());
}
