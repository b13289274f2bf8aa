//! Why a device was lost, for errors and statistics.

/// Why a device was lost or given up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum LossReason {
    /// The driver reported it.
    #[default]
    Driver,
    /// [`Device::destroy`](crate::Device::destroy) was called.
    Destroyed,
    /// A submission was not answered in time.
    NoAnswer,
    /// A step of an engine took longer than its limit.
    SlowStep,
    /// Out of memory during an engine step.
    OutOfMemory,
    /// An engine step was refused: a pipeline, buffer or submission.
    Refused,
    /// Opening the device or loading onto it failed.
    NotOpened,
    /// A panic while using the device.
    Panic,
}

impl LossReason {
    /// All reasons.
    pub const ALL: [LossReason; 8] = [
        LossReason::Driver,
        LossReason::Destroyed,
        LossReason::NoAnswer,
        LossReason::SlowStep,
        LossReason::OutOfMemory,
        LossReason::Refused,
        LossReason::NotOpened,
        LossReason::Panic,
    ];

    /// Name in metrics.
    pub fn name(self) -> &'static str {
        match self {
            LossReason::Driver => "driver",
            LossReason::Destroyed => "destroyed",
            LossReason::NoAnswer => "no_answer",
            LossReason::SlowStep => "slow_step",
            LossReason::OutOfMemory => "out_of_memory",
            LossReason::Refused => "refused",
            LossReason::NotOpened => "not_opened",
            LossReason::Panic => "panic",
        }
    }
}
