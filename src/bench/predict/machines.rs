//! Manufacturers' figures of eight GPUs.

use crate::shaders::Tier;
use crate::target::{Target, TargetKind, TargetLimits};

/// A GPU by its manufacturer's figures. Rates are peaks at boost clock with dense operands; a fused multiply-add is
/// two operations.
#[derive(Clone, Copy, Debug, serde::Serialize)]
pub struct Machine {
    /// Display name, matched by `--predict`.
    pub name: &'static str,
    /// Source of the figures.
    pub source: &'static str,
    /// Memory bandwidth in bytes per second.
    pub memory_rate: f64,
    /// Bytes of the last-level cache.
    pub cache_bytes: u64,
    /// Cores: SMs, compute units, Xe-cores, shader cores.
    pub n_cores: u32,
    /// Lanes per core that issue an instruction in each cycle.
    pub lanes: u32,
    /// Cycles per second.
    pub clock: f64,
    /// Matrix units from f16 to f32, with a matrix size that wgpu supports on this GPU.
    pub matrix: Option<MatrixUnits>,
    /// Bytes per cycle from a core's workgroup memory.
    pub shared_rate: u32,
    /// Invocations per subgroup.
    pub subgroup: u32,
}

/// Matrix units.
#[derive(Clone, Copy, Debug, serde::Serialize)]
pub struct MatrixUnits {
    /// Rows and columns.
    pub size: u32,
    /// Operations per second.
    pub rate: f64,
    /// Whether they occupy the lanes, as on RDNA 3 and Apple GPUs, or work in parallel.
    pub on_lanes: bool,
}

/// The GPUs with predictions.
pub const MACHINES: [Machine; 8] = [
    Machine {
        name: "RTX 4090",
        source: "NVIDIA Ada GPU architecture, 2022, appendix A",
        memory_rate: 1008e9,
        cache_bytes: 72 << 20,
        n_cores: 128,
        lanes: 128,
        clock: 2.52e9,
        matrix: Some(MatrixUnits { size: 16, rate: 165.2e12, on_lanes: false }),
        shared_rate: 128,
        subgroup: 32,
    },
    Machine {
        name: "H100 SXM",
        source: "NVIDIA H100 Tensor Core GPU architecture, 2022, table 2, and data sheet",
        memory_rate: 3350e9,
        cache_bytes: 50 << 20,
        n_cores: 132,
        lanes: 128,
        clock: 1.98e9,
        matrix: Some(MatrixUnits { size: 16, rate: 989.4e12, on_lanes: false }),
        shared_rate: 128,
        subgroup: 32,
    },
    Machine {
        name: "RX 7900 XTX",
        source: "AMD Radeon RX 7900 XTX specifications; RDNA 3 instruction set architecture, 2023",
        memory_rate: 960e9,
        cache_bytes: 96 << 20,
        n_cores: 96,
        lanes: 64,
        clock: 2.5e9,
        matrix: Some(MatrixUnits { size: 16, rate: 122.8e12, on_lanes: true }),
        shared_rate: 128,
        subgroup: 64,
    },
    Machine {
        name: "RX 6700 XT",
        source: "AMD Radeon RX 6700 XT specifications; RDNA 2 instruction set architecture, 2020",
        memory_rate: 384e9,
        cache_bytes: 96 << 20,
        n_cores: 40,
        lanes: 64,
        clock: 2.581e9,
        matrix: None,
        shared_rate: 128,
        subgroup: 64,
    },
    Machine {
        name: "Arc A770",
        source: "Intel Arc A770 specifications; wgpu 30 does not support its 8 x 16 matrices",
        memory_rate: 560e9,
        cache_bytes: 16 << 20,
        n_cores: 32,
        lanes: 128,
        clock: 2.1e9,
        matrix: None,
        shared_rate: 128,
        subgroup: 32,
    },
    Machine {
        name: "Apple M2",
        source: "Apple M2 newsroom, 2022: 100 GB/s and 3.6 TFLOP/s with 10 cores",
        memory_rate: 100e9,
        cache_bytes: 8 << 20,
        n_cores: 10,
        lanes: 128,
        clock: 1.398e9,
        matrix: Some(MatrixUnits { size: 8, rate: 3.6e12, on_lanes: true }),
        shared_rate: 64,
        subgroup: 32,
    },
    Machine {
        name: "Apple M3 Max",
        source: "Apple M3 Max specifications: 400 GB/s with 40 cores; clock as reported by users",
        memory_rate: 400e9,
        cache_bytes: 48 << 20,
        n_cores: 40,
        lanes: 128,
        clock: 1.398e9,
        matrix: Some(MatrixUnits { size: 8, rate: 14.3e12, on_lanes: true }),
        shared_rate: 64,
        subgroup: 32,
    },
    Machine {
        name: "Adreno 750",
        source: "Qualcomm Snapdragon 8 Gen 3 product brief: LPDDR5X at 4800 MHz; cores and clock as reported by users",
        memory_rate: 77e9,
        cache_bytes: 12 << 20,
        n_cores: 6,
        lanes: 256,
        clock: 0.903e9,
        matrix: None,
        shared_rate: 128,
        subgroup: 64,
    },
];

impl Machine {
    /// The machine whose name contains this text, ignoring case and spaces.
    pub fn named(name: &str) -> Option<&'static Machine> {
        let plain = |text: &str| text.to_lowercase().replace([' ', '-', '_'], "");
        let wanted = plain(name);
        const { &MACHINES }.iter().find(|machine| !wanted.is_empty() && plain(machine.name).contains(&wanted))
    }

    /// The target of its recordings: with matrix units if wgpu supports them, else with subgroups.
    pub fn target(&self) -> Target {
        let tier = match self.matrix {
            Some(MatrixUnits { size: 16, .. }) => Tier::Matrix16,
            Some(_) => Tier::Matrix8,
            None => Tier::Subgroups,
        };
        let limits = TargetLimits {
            max_workgroups: 65_535,
            max_binding_bytes: (1 << 31) - 256,
            max_dispatch_operations: 1 << 38,
            max_subgroup: self.subgroup,
            max_workgroup_bytes: 48 << 10,
            max_splits: 8,
            params_stride: 256,
        };
        Target::new(TargetKind::Gpu, tier, limits)
    }

    /// Lane instructions per second.
    pub fn lane_rate(&self) -> f64 {
        f64::from(self.n_cores) * f64::from(self.lanes) * self.clock
    }

    /// Bytes per second from all cores' workgroup memory.
    pub fn shared_memory_rate(&self) -> f64 {
        f64::from(self.n_cores) * f64::from(self.shared_rate) * self.clock
    }
}
