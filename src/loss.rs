//! Why a device is gone: what errors say, and what losses are counted by.

/// Why a device is gone, or was given up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum LossReason {
    /// Its driver says so.
    #[default]
    Driver,
    /// [`Device::destroy`](crate::Device::destroy) was called.
    Destroyed,
    /// A submission was not answered in time.
    NoAnswer,
    /// A step of an engine took longer than its limit.
    SlowStep,
    /// It had no memory left for a step of an engine.
    OutOfMemory,
    /// It refused a step of an engine: a pipeline, a buffer or a submission.
    Refused,
    /// It could not be opened, or nothing could be loaded onto it.
    NotOpened,
    /// What used it panicked.
    Panic,
}

impl LossReason {
    /// All of them.
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

    /// Its name among the measures.
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
