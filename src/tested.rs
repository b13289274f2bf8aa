//! Self-test results, shared by all handles of a device.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use crate::recording::PipelineKey;

/// Pipelines that agree with the CPU, and shader variants that do not.
#[derive(Debug, Default)]
pub(crate) struct Tested(Mutex<TestResults>);

/// The results as plain values.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct TestResults {
    /// Keys of pipelines that passed.
    pub passed: BTreeSet<String>,
    /// Keys of pipelines without a test. This process uses them, but does not save them as passed.
    pub untested: BTreeSet<String>,
    /// Labels of banned variants and their failures.
    pub banned: BTreeMap<&'static str, String>,
    /// Notices for the user.
    pub notices: Vec<String>,
}

impl Tested {
    /// This process's results for an adapter, driver and tier. `identity`: adapter, backend, driver and tier.
    pub fn of_process(identity: [String; 4]) -> Arc<Tested> {
        static ALL: LazyLock<Mutex<HashMap<[String; 4], Arc<Tested>>>> = LazyLock::new(Mutex::default);
        ALL.lock().unwrap_or_else(PoisonError::into_inner).entry(identity).or_default().clone()
    }

    pub fn new(found: TestResults) -> Tested {
        Tested(Mutex::new(found))
    }

    pub fn found(&self) -> TestResults {
        self.lock().clone()
    }

    /// Adds results from elsewhere for the same adapter and driver.
    #[cfg(all(target_arch = "wasm32", feature = "web"))]
    pub fn merge(&self, found: TestResults) {
        let mut own = self.lock();
        own.passed.extend(found.passed);
        own.banned.extend(found.banned);
    }

    /// Whether the pipeline needs no further test.
    pub fn has_passed(&self, pipeline: &PipelineKey) -> bool {
        let (own, pipeline) = (self.lock(), pipeline.to_string());
        own.passed.contains(&pipeline) || own.untested.contains(&pipeline)
    }

    pub fn is_banned(&self, label: &str) -> bool {
        self.lock().banned.contains_key(label)
    }

    /// Labels of all banned variants.
    pub fn banned(&self) -> BTreeSet<&'static str> {
        // `collect` would sort first, with 5 KB more code.
        let mut labels = BTreeSet::new();
        labels.extend(self.lock().banned.keys().copied());
        labels
    }

    pub fn pass(&self, pipelines: impl IntoIterator<Item = PipelineKey>) {
        self.lock().passed.extend(pipelines.into_iter().map(|pipeline| pipeline.to_string()));
    }

    /// Accepts a pipeline without a test.
    pub fn leave_untested(&self, pipeline: PipelineKey) {
        self.note(format!("`{pipeline}` is used untested"));
        self.lock().untested.insert(pipeline.to_string());
    }

    pub fn ban(&self, label: &'static str, found: &str) {
        let mut own = self.lock();
        if own.banned.insert(label, found.into()).is_none() {
            own.notices.push(format!("`{label}` is not used on this driver: {found}"));
        }
    }

    pub fn note(&self, notice: String) {
        let mut own = self.lock();
        if !own.notices.contains(&notice) {
            own.notices.push(notice);
        }
    }

    /// Takes back a notice.
    pub fn withdraw(&self, notice: &str) {
        self.lock().notices.retain(|own| own != notice);
    }

    pub fn take_notices(&self) -> Vec<String> {
        std::mem::take(&mut self.lock().notices)
    }

    fn lock(&self) -> MutexGuard<'_, TestResults> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
