//! Tables in Markdown, one per kernel or pass.

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

/// Instructions of the hot loop per product.
pub fn per_product(case: &Case, compiled: &Compiled) -> Option<f64> {
    let products = case.products_per_round()?;
    Some(f64::from(compiled.listing.hot()?.counts.all) / f64::from(products))
}
