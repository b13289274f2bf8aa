//! The self-test and the tuner: results are saved, saved results are not trusted, and failed variants are not used.

#[path = "../../../tests/common/mod.rs"]
mod common;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use common::block_on;
use serde_json::Value;
use tilewright::kernels;
use tilewright::load::ModelFile;
use tilewright::tuning::{TuneOnLoad, tune};
use tilewright::{
    Bucket, Choice, Device, DeviceChoice, Error, GenerateOptions, LoadOptions, Matrix, Model, Tier, Tuning, WeightType,
    Workspace, shaders,
};

/// A test's own, empty folder.
fn folder(name: &str) -> PathBuf {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("tuning").join(name);
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

fn open(folder: &Path) -> Option<Device> {
    common::gpu_from(block_on(Device::open_in(&DeviceChoice::Gpu, None, Some(folder))))
}

fn tilewright(folder: &Path, args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tilewright"));
    command.args(args).env("TILEWRIGHT_CACHE_DIR", folder).env_remove("TILEWRIGHT_DEVICE").output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

fn tokens(device: &Device, n: usize) -> Vec<u32> {
    tokens_of(&Model::builtin(device).unwrap(), n)
}

fn tokens_of(model: &Model, n: usize) -> Vec<u32> {
    let mut session = model.session().unwrap();
    let options = GenerateOptions { ignore_eos: true, ..GenerateOptions::greedy(n) };
    let mut generation = session.generate("Once upon a time", &options).unwrap();
    let mut ids = Vec::new();
    while let Some(piece) = block_on(generation.next()) {
        ids.push(piece.unwrap().id);
    }
    ids
}

/// A choice that no heuristic makes.
const ODD: Choice = Choice::new(Tier::Baseline, 2);

fn odd_tuning(device: &Device) -> Tuning {
    let mut tuning = device.tuning().clone();
    tuning.choose(Bucket { kernel: "matvec", weight: WeightType::Q8_0, rows: 128, blocks: 4, tokens: 1 }, Some(ODD));
    tuning
}

/// Passed pipelines, as in the file.
fn passed(device: &Device) -> Vec<String> {
    let value: Value = serde_json::from_slice(&std::fs::read(device.tuning_file().unwrap()).unwrap()).unwrap();
    value["passed"].as_array().unwrap().iter().map(|pipeline| pipeline.as_str().unwrap().to_string()).collect()
}

#[test]
fn self_test_results_are_saved_and_reused() {
    let folder = folder("kept");
    let Some(first) = open(&folder) else { return };
    assert_eq!((first.counters(), first.n_passed()), (Default::default(), 0), "opening tests nothing");
    Model::builtin(&first).unwrap();
    assert!(first.counters().dispatches > 0 && first.n_passed() > 10, "{}", first.n_passed());
    assert_eq!((first.banned(), first.take_notices()), (Vec::new(), Vec::new()));
    assert_eq!(passed(&first).len(), first.n_passed());

    let again = open(&folder).unwrap();
    Model::builtin(&again).unwrap();
    assert_eq!((again.counters().dispatches, again.counters().pipelines_created), (0, 0));
    assert_eq!(again.n_passed(), first.n_passed());

    let tuned = again.with_tuning(odd_tuning(&again));
    tuned.save_tuning().unwrap();
    let again = open(&folder).unwrap();
    assert_eq!(again.tuning(), tuned.tuning());
    assert_eq!(again.tuning().choices().map(|(_, choice)| choice).collect::<Vec<_>>(), [ODD]);
    assert_eq!(again.n_passed(), first.n_passed());
    let files: Vec<_> = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert_eq!(files, [again.tuning_file().unwrap()], "nothing else is left behind");
}

#[test]
fn device_handles_do_not_overwrite_each_others_results() {
    let folder = folder("shared");
    let Some(early) = open(&folder) else { return };
    let late = open(&folder).unwrap();
    late.with_tuning(odd_tuning(&late)).save_tuning().unwrap();
    Model::builtin(&early).unwrap();
    let again = open(&folder).unwrap();
    assert_eq!(again.tuning().choices().count(), 1, "the early handle had no choices");
    assert_eq!(again.n_passed(), early.n_passed());
}

#[test]
fn tuned_choice_is_used_where_available() {
    let Some(device) = common::gpu(Some(Tier::Baseline)) else { return };
    let label = |device: &Device| {
        let w = Matrix::declare(&device.target(), "w", WeightType::Q8_0, 100, 128).unwrap();
        let x = device.upload("x", &[1, 128], &[0f32; 128]).unwrap();
        let y = device.upload("y", &[1, 100], &[0f32; 100]).unwrap();
        let mut rec = device.recorder();
        kernels::matvec(&mut rec, &kernels::Linear::new(&w), &x, &y).unwrap();
        rec.finish(&mut Workspace::default()).labels().next().unwrap()
    };
    let with = |tier, size| {
        let mut tuning = device.tuning().clone();
        let bucket = Bucket { kernel: "matvec", weight: WeightType::Q8_0, rows: 128, blocks: 4, tokens: 1 };
        tuning.choose(bucket, Some(Choice::new(tier, size)));
        device.with_tuning(tuning)
    };
    assert_eq!(label(&device), "matvec.Q8_0.t0");
    assert_eq!(label(&with(Tier::Scalar, 1)), "matvec.Q8_0.scalar");
    // Tiers that a device lacks, and sizes that no kernel supports.
    for (tier, size) in
        [(Tier::Subgroups, 4), (Tier::F16, 4), (Tier::Scalar, 2), (Tier::Baseline, 3), (Tier::Baseline, 0)]
    {
        assert_eq!(label(&with(tier, size)), "matvec.Q8_0.t0", "{tier:?} {size}");
    }
}

#[test]
fn invalid_tuning_file_is_ignored_with_a_notice() {
    let folder = folder("useless");
    let Some(device) = open(&folder) else { return };
    Model::builtin(&device).unwrap();
    let path = device.tuning_file().unwrap().to_path_buf();
    device.with_tuning(odd_tuning(&device)).save_tuning().unwrap();
    let good = std::fs::read_to_string(&path).unwrap();
    let value: Value = serde_json::from_str(&good).unwrap();
    let with = |field: &str, content: Value| {
        let mut value = value.clone();
        value[field] = content;
        value.to_string()
    };
    let mut size = value.clone();
    size["choices"][0]["size"] = 3.into();
    let mut kernel = value.clone();
    kernel["choices"][0]["kernel"] = "matmat".into();
    let mut rows = value.clone();
    rows["choices"][0]["rows"] = 12.into();
    let cases = [
        ("rows", format!("{rows:#}\n"), "digest does not match"),
        ("no digest", rows.to_string(), "no digest"),
        ("empty", String::new(), "not JSON"),
        ("text", "not a tuning".into(), "not JSON"),
        ("cut", good[..good.len() / 2].into(), "not JSON"),
        ("another value", "[1, 2]".into(), "format"),
        ("deep", "[".repeat(100_000), "not JSON"),
        ("format", with("format", 1.into()), "format is 1"),
        ("driver", with("driver", "another driver 1.0".into()), "another driver 1.0"),
        ("adapter", with("adapter", "another adapter".into()), "another adapter"),
        ("version", with("version", "0.0.9".into()), "0.0.9"),
        ("shaders", with("shaders", "0".into()), "shaders"),
        ("compiler", with("compiler", "another compiler 1.0".into()), "another compiler 1.0"),
        ("checked", with("checked", (value["checked"] == false).into()), "its checked is"),
        ("no choices", with("choices", Value::Null), "null"),
        ("size", size.to_string(), "size is 3"),
        ("kernel", kernel.to_string(), "matmat"),
        ("label", with("passed", serde_json::json!(["no.such.variant"])), "no.such.variant"),
        ("baseline", with("banned", serde_json::json!({ "rms_norm.t0": "" })), "rms_norm.t0"),
        ("large", " ".repeat(5 << 20), "bytes"),
    ];
    for (what, content, expected) in cases {
        std::fs::write(&path, content).unwrap();
        let device = open(&folder).unwrap();
        let notices = &device.info().notices;
        assert_eq!(notices.len(), 1, "{what}: {notices:?}");
        assert!(notices[0].contains("is ignored") && notices[0].contains(expected), "{what}: {}", notices[0]);
        let known = (device.tuning().choices().count(), device.banned().len(), device.n_passed());
        assert_eq!(known, (0, 0, 0), "{what}");
        device.save_tuning().unwrap();
        assert!(open(&folder).unwrap().info().notices.is_empty(), "{what}: the file was rewritten");
    }
}

#[test]
fn unwritable_tuning_folder_gives_a_notice() {
    let blocker = folder("blocked").join("file");
    std::fs::write(&blocker, "").unwrap();
    let Some(device) = open(&blocker.join("folder")) else { return };
    Model::builtin(&device).unwrap();
    let notices = device.take_notices();
    assert!(notices.len() == 1 && notices[0].contains("was not saved"), "{notices:?}");
    assert!(device.n_passed() > 0);
    assert!(matches!(device.save_tuning(), Err(Error::Io { .. })));

    let output = tilewright(&blocker.join("folder"), &["run", "--device", "gpu", "--max-tokens", "1"]);
    let message = text(&output.stderr);
    assert!(output.status.success() && message.matches("notice: ").count() == 1, "{message}");
}

#[test]
fn miscompiled_variant_is_banned_and_replaced() {
    let Some(device) = common::gpu(None) else { return };
    let tier = device.tier();
    let want = tokens(&device, 24);
    for (kernel, weight) in [
        ("rms_norm", None),
        // With an F16 cache.
        ("attention_decode", Some(WeightType::F16)),
        ("attention_prefill", Some(WeightType::F16)),
        ("matvec", Some(WeightType::Q8_0)),
        ("matmul", Some(WeightType::Q8_0)),
    ] {
        let kernel = shaders::ALL.iter().find(|k| k.name == kernel).unwrap();
        let variant = kernel.variant(weight, tier).unwrap();
        if variant.tier == Tier::Baseline {
            common::skip_part(format_args!("`{}` has one variant in tier {}", kernel.name, tier.name()));
            continue;
        }
        let folder = folder(variant.label);
        let device = block_on(Device::open_broken(&DeviceChoice::Gpu, None, &folder, variant.label)).unwrap();
        assert_eq!(tokens(&device, 24), want, "without {}", variant.label);
        let banned: Vec<&str> = device.banned().iter().map(|(label, _)| *label).collect();
        assert_eq!(banned, [variant.label]);
        let notices = device.take_notices();
        assert!(notices.len() == 1 && notices[0].contains(variant.label), "{notices:?}");

        // The ban is saved and reported.
        assert_eq!(open(&folder).unwrap().banned(), device.banned());
        let json = tilewright(&folder, &["info", "--device", "gpu", "--json"]);
        let value: Value = serde_json::from_slice(&json.stdout).unwrap();
        assert_eq!(value["tuning"]["banned"][0]["variant"], variant.label, "{value}");
        assert_eq!(value["tuning"]["file"], device.tuning_file().unwrap().to_str().unwrap());
        let table = text(&tilewright(&folder, &["info", "--device", "gpu"]).stdout);
        assert!(table.contains("1 variants banned") && table.contains(variant.label), "{table}");
    }
}

#[test]
fn miscompiled_pipeline_is_replaced_before_the_first_token() {
    let folder_of_all = folder("pipelines");
    let open = |folder: &Path, broken: &str| {
        let opened = Device::open_broken(&DeviceChoice::Gpu, Some(Tier::Subgroups), folder, broken);
        common::gpu_from(block_on(opened))
    };
    let Some(device) = open(&folder_of_all, "none") else { return };
    let want = tokens(&device, 24);
    // Values that a test of the variant's default form would not cover.
    let all = passed(&device);
    for (kernel, constants) in [("matvec.Q8_0", "NORM=1"), ("matvec.Q8_0", "LANES=16"), ("gate_up.Q8_0", "NORM=1")] {
        let is_meant =
            |pipeline: &&String| pipeline.starts_with(&format!("{kernel}.t2 ")) && pipeline.contains(constants);
        let pipeline = all.iter().find(is_meant).unwrap_or_else(|| panic!("no {kernel} {constants} in {all:?}"));
        let label = pipeline.split(' ').next().unwrap();
        let device = open(&folder(&format!("pipelines.{kernel}")), pipeline).unwrap();
        assert_eq!(tokens(&device, 24), want, "without {pipeline}");
        assert_eq!(device.banned().iter().map(|(label, _)| *label).collect::<Vec<_>>(), [label], "{pipeline}");
    }
}

#[test]
fn miscompiled_baseline_variant_is_an_error() {
    if common::gpu(None).is_none() {
        return;
    }
    let folder = folder("baseline");
    let opened = Device::open_broken(&DeviceChoice::Gpu, Some(Tier::Baseline), &folder, "rms_norm.t0");
    let error = Model::builtin(&block_on(opened).unwrap()).err().expect("the model loaded").to_string();
    assert!(error.contains("rms_norm.t0") && error.contains("nothing could take its place"), "{error}");
}

#[test]
fn devices_without_a_folder_share_self_test_results() {
    let Some(first) = common::gpu(None) else { return };
    Model::builtin(&first).unwrap();
    let second = common::gpu(None).unwrap();
    assert!(second.n_passed() >= first.n_passed());
    Model::builtin(&second).unwrap();
    assert_eq!((second.counters().dispatches, second.tuning_file()), (0, None));
    second.save_tuning().unwrap();
}

#[test]
fn tuning_is_fast_and_saved_and_does_not_change_tokens() {
    let folder = folder("tuned");
    let Some(device) = open(&folder) else { return };
    let want = tokens(&device, 64);
    let output = tilewright(&folder, &["tune", "--device", "gpu", "--json"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let value: Value = serde_json::from_slice(&output.stdout).unwrap();
    let rows = value["rows"].as_array().unwrap();
    for kernel in ["matvec", "gate_up", "matmul"] {
        assert!(rows.iter().any(|row| row["kernel"] == kernel), "{kernel} is missing in {value}");
    }
    let same = |row: &Value| row["usual"]["tier"] == row["best"]["tier"] && row["usual"]["size"] == row["best"]["size"];
    for row in rows {
        let number = |value: &Value| value.as_f64().unwrap_or_else(|| panic!("a number is missing in {row}"));
        let [usual, best] = ["usual", "best"].map(|which| number(&row[which]["seconds"]));
        assert!(best > 0.0 && (same(row) || best <= 0.95 * usual), "{row}");
        assert!((1.0..=number(&row["n_candidates"])).contains(&number(&row["n_measured"])), "{row}");
    }
    let tuned = open(&folder).unwrap();
    assert_eq!(tuned.tuning().choices().count(), rows.iter().filter(|row| !same(row)).count());
    assert_eq!(tokens(&tuned, 64), want);
    // The slowest product of prefill determines the work per dispatch.
    let rate = |row: &Value| {
        let [rows, cols, tokens] = [&row["rows"], &row["blocks"], &row["tokens"]].map(|n| n.as_f64().unwrap());
        2.0 * rows * 32.0 * cols * tokens / row["best"]["seconds"].as_f64().unwrap()
    };
    let fastest =
        rows.iter().filter(|row| row["kernel"].as_str().unwrap().starts_with("matmul")).map(rate).fold(0.0, f64::max);
    let kept = tuned.tuning().operations_rate().expect("prefill products were measured");
    // Row counts are rounded up to powers of two.
    assert!(kept > 0 && kept as f64 <= fastest, "{kept} of at most {fastest}");
    assert_eq!(tuned.target().max_dispatch_operations(), (kept / 4).max(1 << 27));
    println!("{} of {} buckets have another choice", tuned.tuning().choices().count(), rows.len());

    // Arbitrary choices give the same tokens too.
    for lanes in [1, 8, 64] {
        let mut tuning = device.tuning().clone();
        for kernel in ["matvec", "gate_up"] {
            for (rows, blocks) in (0..12).flat_map(|r| (0..6).map(move |b| (1 << r, 1 << b))) {
                let bucket = Bucket { kernel, weight: WeightType::Q8_0, rows, blocks, tokens: 1 };
                tuning.choose(bucket, Some(Choice::new(Tier::Baseline, lanes)));
            }
        }
        assert_eq!(tokens(&device.with_tuning(tuning), 64), want, "{lanes} lanes");
    }
}

#[test]
fn tuning_the_cpu_is_refused() {
    let model = ModelFile::builtin().unwrap();
    assert!(matches!(block_on(tune(&Device::cpu(), &model)), Err(Error::Option { option: "device", .. })));
    assert_eq!(*Device::cpu().tuning(), Tuning::default());
}

/// Loads a model, the built-in one without a path, and measures where `tune` says.
fn load(device: &Device, path: Option<&Path>, tune: TuneOnLoad) -> Result<Model, Error> {
    let file = match path {
        Some(path) => ModelFile::open(path),
        None => ModelFile::builtin(),
    };
    Model::from_file(device, file?, LoadOptions { tune, ..LoadOptions::default() })
}

/// Measured buckets, as in the file.
fn measured(device: &Device) -> Vec<String> {
    let value: Value = serde_json::from_slice(&std::fs::read(device.tuning_file().unwrap()).unwrap()).unwrap();
    let bucket =
        |row: &Value| ["kernel", "weight", "rows", "blocks", "tokens"].map(|key| row[key].to_string()).join(" ");
    value["choices"].as_array().unwrap().iter().map(bucket).collect()
}

fn is_measurement(notice: &str) -> bool {
    notice.contains("were measured in")
}

#[test]
fn first_load_measures_what_is_unknown_and_later_ones_nothing() {
    let folder = folder("first_load");
    let Some(device) = open(&folder) else { return };
    let want = tokens(&device, 32);
    let is_software = block_on(Device::adapters())[0].is_software;
    if is_software {
        let before = device.counters().dispatches;
        load(&device, None, TuneOnLoad::Gpus).unwrap();
        assert_eq!(device.counters().dispatches, before, "software adapters are measured for tests only");
        assert_eq!(measured(&device), [""; 0]);
    }
    assert_eq!(device.take_notices(), [""; 0]);

    let start = std::time::Instant::now();
    let model = load(&device, None, TuneOnLoad::AllAdapters).unwrap();
    println!("loaded and measured in {:.1} s", start.elapsed().as_secs_f64());
    let notices = device.take_notices();
    assert!(notices.len() == 1 && is_measurement(&notices[0]), "{notices:?}");
    println!("{}", notices[0]);
    let builtin = measured(&device);
    for kernel in ["matvec", "gate_up", "matmul"] {
        assert!(builtin.iter().any(|bucket| bucket.contains(kernel)), "{kernel} is missing in {builtin:?}");
    }
    assert_eq!(tokens_of(&model, 32), want);

    // The same handle, whose own tuning is older than the file, and a new one.
    let before = device.counters().dispatches;
    load(&device, None, TuneOnLoad::AllAdapters).unwrap();
    assert_eq!(device.counters().dispatches, before);
    let again = open(&folder).unwrap();
    let model = load(&again, None, TuneOnLoad::AllAdapters).unwrap();
    assert_eq!((again.counters().dispatches, again.take_notices()), (0, Vec::new()));
    assert_eq!(model.device().tuning(), again.tuning());
    assert_eq!(tokens_of(&model, 32), want);

    // Products of another model are added.
    let other = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/tiny-random/llama3-rope");
    load(&again, Some(&other), TuneOnLoad::AllAdapters).unwrap();
    let notices = again.take_notices();
    assert!(notices.len() == 1 && is_measurement(&notices[0]), "{notices:?}");
    let both = measured(&again);
    assert!(both.len() > builtin.len() && builtin.iter().all(|bucket| both.contains(bucket)), "{both:?}");
    let last = open(&folder).unwrap();
    for path in [None, Some(other.as_path())] {
        load(&last, path, TuneOnLoad::AllAdapters).unwrap();
    }
    assert_eq!((last.counters().dispatches, last.take_notices()), (0, Vec::new()));
}

#[test]
fn loads_without_a_tuning_file_measure_nothing() {
    let Some(device) = common::gpu(None) else { return };
    Model::builtin(&device).unwrap();
    let before = device.counters().dispatches;
    load(&device, None, TuneOnLoad::AllAdapters).unwrap();
    assert_eq!(device.counters().dispatches, before);
}

/// Else each load would lose it again.
#[cfg(feature = "fault-injection")]
#[test]
fn device_that_measurements_lose_is_not_measured_again() {
    use tilewright::{Call, Effect, Faults};
    let folder = folder("lost_while_measuring");
    let Some(device) = open(&folder) else { return };
    Model::builtin(&device).unwrap();
    // The self-test is done, so the first submissions are the measurements'.
    let faults = Faults::default().at(Call::Submit, 2, Effect::LoseBefore);
    let opened = Device::open_with_faults(&DeviceChoice::Gpu, None, Some(&folder), &faults);
    let loaded = load(&block_on(opened).unwrap(), None, TuneOnLoad::AllAdapters);
    assert!(matches!(loaded, Err(Error::DeviceLost { .. })), "{:?}", loaded.err());

    let again = open(&folder).unwrap();
    load(&again, None, TuneOnLoad::AllAdapters).unwrap();
    assert_eq!((again.counters().dispatches, again.take_notices()), (0, Vec::new()));
    assert_eq!(again.tuning().choices().count(), 0);
    assert!(!measured(&again).is_empty());
}

#[test]
fn program_measures_at_the_first_run_unless_disabled() {
    let folder = folder("program");
    if open(&folder).is_none() {
        return;
    }
    let run = |args: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tilewright"));
        command.args(["run", "--device", "gpu", "-n", "1"]).args(args).env("TILEWRIGHT_TUNE_SOFTWARE", "1");
        let start = std::time::Instant::now();
        let output = command.env("TILEWRIGHT_CACHE_DIR", &folder).env_remove("TILEWRIGHT_DEVICE").output().unwrap();
        println!("run {args:?}: {:.1} s", start.elapsed().as_secs_f64());
        let messages = text(&output.stderr);
        assert!(output.status.success(), "{messages}");
        (text(&output.stdout), messages.lines().filter(|line| line.contains("were measured in")).count())
    };
    let (story, notices_of_run) = run(&["--no-tune"]);
    assert_eq!(notices_of_run, 0);
    assert_eq!([run(&[]), run(&[])], [(story.clone(), 1), (story, 0)]);
}
