//! `tilewright bench --report`: the same report as `www/bench.html`.

use std::fs;
use std::io::{self, Write};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Map, Value, json};
use tilewright::bench::Row;
use tilewright::bench::report::{self, Measurements, OtherTiers, ReportDevice, SCHEMA};
use tilewright::{AdapterReport, Device, DeviceChoice, Error, Model, Tier};

use super::super::{CommandFailure, print_json, progress};

/// Refuses to overwrite a file that is not a report, before anything is measured.
pub fn check(path: &Path) -> Result<(), CommandFailure> {
    let is_report =
        |text: &[u8]| serde_json::from_slice::<Value>(text).is_ok_and(|value| value["schema"].as_str() == Some(SCHEMA));
    match fs::metadata(path) {
        Ok(found) if !is_stdout(path) => {
            // A report has a few hundred lines.
            let is_small = found.is_file() && found.len() < 1 << 20;
            if is_small && fs::read(path).is_ok_and(|text| text.is_empty() || is_report(&text)) {
                return Ok(());
            }
            let expected = "a new file, or a report to overwrite".into();
            Err(Error::Option { option: "report", expected, found: path.display().to_string() }.into())
        }
        _ => Ok(()),
    }
}

fn is_stdout(path: &Path) -> bool {
    path.as_os_str() == "-"
}

/// The adapter of an open device.
fn adapter_of(device: &Device) -> Option<AdapterReport> {
    let info = device.info();
    let is_it =
        |found: &AdapterReport| found.name == info.name && found.backend == info.backend && found.driver == info.driver;
    device.is_gpu().then(|| pollster::block_on(Device::adapters()).into_iter().find(is_it)).flatten()
}

/// Measures probes and kernels.
pub fn measure(device: &Device, quick: bool) -> Result<Measurements, CommandFailure> {
    let adapter = adapter_of(device);
    let open = |tier: Tier| {
        let choice = DeviceChoice::Named(device.info().name.clone());
        pollster::block_on(Device::open(&choice, Some(tier))).ok()
    };
    let half = adapter.as_ref().filter(|adapter| adapter.has_f16).and_then(|_| open(Tier::F16));
    let matrices = adapter.as_ref().and_then(|adapter| adapter.matrices.iter().max().copied());
    let has_size = |tier: &Tier| tier.matrix_size() == matrices;
    let matrices = matrices.and_then(|_| Tier::ALL.into_iter().find(has_size)).and_then(open);
    let others = OtherTiers { half: half.as_ref(), matrices: matrices.as_ref() };
    let shows = progress::is_shown();
    let measured = pollster::block_on(report::measure(device, others, quick, &mut |_, done, total| {
        if shows {
            say_part!("\rmeasured {done} of {total}");
        }
    }));
    if shows {
        say!();
    }
    Ok(measured?)
}

pub fn write(
    path: &Path,
    measured: &Measurements,
    device: &Device,
    model: &Model,
    rows: &[Row],
) -> Result<(), CommandFailure> {
    let adapter = adapter_of(device).map(|adapter| {
        let limits: Map<String, Value> = adapter.limits().into_iter().map(|(k, v)| (k.into(), v.into())).collect();
        json!({
            "vendor": adapter.vendor(),
            "architecture": "",
            "description": adapter.name,
            "kind": adapter.kind,
            "features": adapter.features(),
            "limits": limits,
        })
    });
    let tests: Vec<Value> = rows
        .iter()
        .map(|row| {
            json!({
                "test": row.test,
                "phase": row.phase,
                "n_tokens": row.n_tokens,
                "depth": row.depth,
                "tokens_per_second": row.tokens_per_second,
            })
        })
        .collect();
    let unix_time = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
    let types: Vec<&str> = model.block_types().iter().map(|t| t.name()).collect();
    let value = json!({
        "schema": SCHEMA,
        "tilewright": env!("CARGO_PKG_VERSION"),
        "source": "cli",
        "unix_time": unix_time,
        "host": { "os": std::env::consts::OS, "arch": std::env::consts::ARCH, "browser": Value::Null },
        "device": ReportDevice::new(device),
        "adapter": adapter,
        "settings": measured.settings,
        "probes": measured.probes,
        "kernels": measured.kernels,
        "models": [{
            "name": model.name(),
            "architecture": model.config().architecture,
            "weight_types": types,
            "weights_bytes": model.plan().weights_bytes,
            "kv_type": model.kv_type().name(),
            "tests": tests,
        }],
    });
    if is_stdout(path) {
        return print_json(&value);
    }
    let text = serde_json::to_string_pretty(&value).unwrap_or_default() + "\n";
    fs::write(path, text).map_err(|source| Error::Io { path: path.to_path_buf(), source })?;
    let mut err = io::stderr().lock();
    writeln!(err, "wrote {}; benches/record/community/README.md says where to send it", path.display())?;
    Ok(())
}
