//! Tables in Markdown, one per kernel or pass.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use crate::cases::Case;
use crate::compiler::Compiled;

/// Result of a case.
pub type Outcome = (Case, Result<Compiled, String>);

/// All tables, in the order of the outcomes.
pub fn tables(outcomes: &[Outcome]) -> String {
    let mut text = String::new();
    for group in outcomes.chunk_by(|a, b| a.0.group == b.0.group) {
        let _ = writeln!(text, "\n## {}\n", group[0].0.group);
        text.push_str(
            "| variant | lanes | VGPRs | spills | scratch | LDS | waves | instructions | latency | inverse throughput | hot loop | \
             arithmetic in it | loads of 16 B, of fewer | LDS accesses, of 16 B | barriers | around it | per product |\n\
             |---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|\n",
        );
        for (case, compiled) in group {
            match compiled {
                Ok(compiled) => text.push_str(&row(case, compiled)),
                Err(error) => {
                    let _ = writeln!(text, "| {} | {} |", case.label, error.lines().next().unwrap_or_default());
                }
            }
        }
    }
    text
}

fn row(case: &Case, compiled: &Compiled) -> String {
    let get = |name| compiled.get(name);
    let hot = compiled.listing.hot();
    let feeding = compiled.listing.feeding();
    let of_hot = |text: &dyn Fn(&crate::listing::Counts) -> String| hot.map_or(String::new(), |l| text(&l.counts));
    // The loop that feeds the hot one has the loads and barriers.
    let of_feeding =
        |text: &dyn Fn(&crate::listing::Counts) -> String| text(&feeding.map_or(compiled.listing.total, |l| l.counts));
    let cells = [
        case.label.clone(),
        compiled.subgroup.to_string(),
        get("VGPRs").to_string(),
        compiled.spills().to_string(),
        get("Scratch size").to_string(),
        get("LDS size").to_string(),
        compiled.waves().to_string(),
        get("Instructions").to_string(),
        get("Latency").to_string(),
        get("Inverse Throughput").to_string(),
        of_hot(&|c| c.all.to_string()),
        of_hot(&|c| if c.matrix > 0 { format!("{} matrix", c.matrix) } else { c.math.to_string() }),
        of_feeding(&|c| format!("{}, {}", c.wide_loads, c.narrow_loads)),
        of_hot(&|c| format!("{}, {}", c.lds, c.lds_bytes / 16)),
        of_feeding(&|c| c.barriers.to_string()),
        of_feeding(&|c| c.all.to_string()),
        per_product(case, compiled).map_or(String::new(), |n| format!("{n:.2}")),
    ];
    format!("| {} |\n", cells.join(" | "))
}

/// A driver's own statistics, of outcomes of the same cases: those of a case below each other.
pub fn statistics(all: &[Vec<Outcome>]) -> String {
    let compiled = all.iter().flatten().filter_map(|(_, compiled)| compiled.as_ref().ok());
    let names: BTreeSet<&String> = compiled.flat_map(|compiled| compiled.statistics.keys()).collect();
    let Some(first) = all.first().filter(|_| !names.is_empty()) else {
        let error = all.iter().flatten().find_map(|(case, compiled)| Some((case, compiled.as_ref().err()?)));
        return error.map_or("the driver has no statistics".into(), |(case, error)| format!("{}: {error}", case.label));
    };
    let mut text = String::new();
    let mut group = "";
    for (at, (case, _)) in first.iter().enumerate() {
        if group != case.group {
            group = &case.group;
            let heads: Vec<&str> = names.iter().map(|name| name.as_str()).collect();
            let _ = writeln!(
                text,
                "\n## {group}\n\n| variant | lanes | {} |\n|---|--:{}|",
                heads.join(" | "),
                "|--:".repeat(heads.len())
            );
        }
        for (case, compiled) in all.iter().filter_map(|outcomes| outcomes.get(at)) {
            let cells: Vec<String> = match compiled {
                Ok(compiled) => {
                    let value = |name: &&String| {
                        compiled.statistics.get(*name).map_or(String::new(), |value| value.to_string())
                    };
                    std::iter::once(compiled.subgroup.to_string()).chain(names.iter().map(value)).collect()
                }
                Err(error) => vec![error.lines().next().unwrap_or_default().to_string()],
            };
            let _ = writeln!(text, "| {} | {} |", case.label, cells.join(" | "));
        }
    }
    text
}

/// Instructions of the hot loop per product.
pub fn per_product(case: &Case, compiled: &Compiled) -> Option<f64> {
    let products = case.products_per_round()?;
    Some(f64::from(compiled.listing.hot()?.counts.all) / f64::from(products))
}
