//! Token constraints on a generation.

use std::sync::mpsc::{Receiver, RecvTimeoutError, SendError, Sender, channel};
use std::time::Duration;

use super::model::Model;
use super::options::GenerateOptions;
use crate::error::Error;
use crate::panics::caught;
use crate::platform::{IS_BROWSER, MaybeSend, Native, native, spawn};

/// Decides which tokens may come next. Implemented by [`grammar`](crate::grammar) and by callers.
pub(crate) trait TokenConstraint: MaybeSend {
    /// Bitmask of the allowed next tokens, `[ceil(V / 32)]`, lowest bit first.
    ///
    /// # Errors
    /// Usually [`Error::Constraint`], if no token is allowed.
    fn allowed(&mut self) -> Result<&[u32], Error>;

    /// Advances by an allowed token other than an end token. Returns the forced next tokens, empty if there is a
    /// choice; `None` if no token may follow.
    ///
    /// # Errors
    /// Usually [`Error::Constraint`], if the token is not allowed.
    fn accept(&mut self, id: u32) -> Result<Option<Vec<u32>>, Error>;
}

/// A sequence's constraint, whose masks a thread may compute while other sequences go on.
pub(crate) struct SequenceConstraint {
    /// `None` while the thread has it.
    constraint: Option<Box<dyn TokenConstraint>>,
    thread: Option<Native<MaskThread>>,
    /// Why the thread computed no mask.
    failed: Option<Error>,
    /// Whether the mask was not there in time, so that nothing waits for it again.
    is_late: bool,
}

/// Computes masks: receives a constraint, and sends it back with its mask, or with an error.
struct MaskThread {
    constraints: Sender<Box<dyn TokenConstraint>>,
    computed: Receiver<(Box<dyn TokenConstraint>, Option<Error>)>,
}

impl MaskThread {
    fn begin() -> std::io::Result<MaskThread> {
        let (constraints, given) = channel::<Box<dyn TokenConstraint>>();
        let (sender, computed) = channel();
        let work = move || {
            for mut constraint in given {
                let allowed = caught("computing the mask of a constraint", || constraint.allowed().map(drop));
                if sender.send((constraint, allowed.flatten().err())).is_err() {
                    return;
                }
            }
        };
        spawn("tilewright mask", work)?;
        Ok(MaskThread { constraints, computed })
    }
}

impl SequenceConstraint {
    pub fn new(constraint: Box<dyn TokenConstraint>) -> SequenceConstraint {
        SequenceConstraint { constraint: Some(constraint), thread: None, failed: None, is_late: false }
    }

    /// Begins to compute the next mask. Without threads, [`SequenceConstraint::allowed`] computes it.
    pub fn begin_mask(&mut self) {
        if IS_BROWSER || self.failed.is_some() {
            return;
        }
        if self.thread.is_none() {
            self.thread = MaskThread::begin().ok().map(native);
        }
        if let (Some(thread), Some(constraint)) = (&self.thread, self.constraint.take()) {
            self.is_late = false;
            // The thread has ended.
            if let Err(SendError(constraint)) = thread.constraints.send(constraint) {
                (self.thread, self.constraint) = (None, Some(constraint));
            }
        }
    }

    /// Whether the mask is there, or no thread computes one. Waits for it up to `most`, but only once.
    pub fn has_mask(&mut self, most: Duration) -> bool {
        let most = if self.is_late { Duration::ZERO } else { most };
        self.wait(most)
    }

    /// As [`SequenceConstraint::has_mask`], but waits each time.
    pub fn wait(&mut self, most: Duration) -> bool {
        let (None, Some(thread), false) = (&self.constraint, &self.thread, IS_BROWSER) else { return true };
        match thread.computed.recv_timeout(most) {
            Ok((constraint, failed)) => (self.constraint, self.failed) = (Some(constraint), failed),
            Err(RecvTimeoutError::Disconnected) => self.thread = None,
            Err(RecvTimeoutError::Timeout) => {
                self.is_late = true;
                return false;
            }
        }
        true
    }

    /// The constraint, from the thread if that has it.
    fn here(&mut self) -> Result<&mut Box<dyn TokenConstraint>, Error> {
        while !self.wait(Duration::from_secs(1)) {}
        self.failed.take().map_or(Ok(()), Err)?;
        self.constraint.as_mut().ok_or_else(|| Error::Panic {
            context: "computing the mask of a constraint".into(),
            message: "its thread has ended".into(),
        })
    }

    /// As [`TokenConstraint::allowed`].
    pub fn allowed(&mut self) -> Result<&[u32], Error> {
        self.here()?.allowed()
    }

    /// As [`TokenConstraint::accept`].
    pub fn accept(&mut self, id: u32) -> Result<Option<Vec<u32>>, Error> {
        self.here()?.accept(id)
    }
}

#[cfg(feature = "grammar")]
impl TokenConstraint for crate::grammar::Guide {
    fn allowed(&mut self) -> Result<&[u32], Error> {
        crate::grammar::Guide::allowed(self)
    }

    fn accept(&mut self, id: u32) -> Result<Option<Vec<u32>>, Error> {
        use crate::grammar::Next;
        Ok(match crate::grammar::Guide::accept(self, id)? {
            Next::Open => Some(Vec::new()),
            Next::Forced(ids) => Some(ids),
            Next::Complete => None,
        })
    }
}

/// The constraint that the options ask for.
#[cfg(feature = "grammar")]
pub(crate) fn token_constraint(
    model: &Model,
    options: &GenerateOptions,
) -> Result<Option<Box<dyn TokenConstraint>>, Error> {
    let Some(constraint) = &options.constraint else { return Ok(None) };
    let end_ids = options.end_ids(model.tokenizer().ok());
    Ok(Some(Box::new(model.grammars()?.begin(constraint, &end_ids)?)))
}

#[cfg(not(feature = "grammar"))]
pub(crate) fn token_constraint(_: &Model, _: &GenerateOptions) -> Result<Option<Box<dyn TokenConstraint>>, Error> {
    Ok(None)
}

#[cfg(all(test, not(target_arch = "wasm32")))]
mod tests {
    use std::sync::mpsc::{Receiver, channel};

    use super::*;
    use crate::Device;
    use crate::engine::{Engine, EngineOptions, Request, Stream};
    use crate::kernels::mask_words;

    /// Allows any token, each only after a permit.
    struct Slow {
        permits: Receiver<()>,
        mask: Vec<u32>,
        is_computed: bool,
    }

    impl TokenConstraint for Slow {
        fn allowed(&mut self) -> Result<&[u32], Error> {
            if !std::mem::replace(&mut self.is_computed, true) {
                let permit = self.permits.recv();
                permit.map_err(|_| Error::Option {
                    option: "slow",
                    expected: "a permit".into(),
                    found: "none".into(),
                })?;
            }
            Ok(&self.mask)
        }

        fn accept(&mut self, _: u32) -> Result<Option<Vec<u32>>, Error> {
            self.is_computed = false;
            Ok(Some(Vec::new()))
        }
    }

    fn ids(mut stream: Stream) -> Result<Vec<u32>, Error> {
        let mut ids = Vec::new();
        while let Some(piece) = pollster::block_on(stream.next()) {
            ids.push(piece?.id);
        }
        Ok(ids)
    }

    /// Sequences with and without a constraint go on while the mask of another is computed. A mask that fails ends
    /// only its own sequence.
    #[test]
    fn mask_being_computed_delays_no_other_sequence() {
        let model = Model::builtin(&Device::cpu()).unwrap();
        let options = EngineOptions { max_sequences: 4, ..EngineOptions::default() };
        let (engine, mut driver) = Engine::new(&model, &options).unwrap();
        let thread = std::thread::spawn(move || pollster::block_on(driver.run()));
        let request = |n| {
            let options = GenerateOptions { ignore_eos: true, ..GenerateOptions::greedy(n) };
            Request::new(model.encode("Once upon a time").unwrap(), options)
        };
        let alone = ids(engine.submit(request(20)).unwrap()).unwrap();
        let mask = vec![u32::MAX; mask_words(model.config().vocab_size) as usize];
        let constrained = |permits| {
            let constraint = Slow { permits, mask: mask.clone(), is_computed: false };
            engine.submit_constrained(request(20), Some(Box::new(constraint))).unwrap()
        };
        let ((permit, permits), (broken, no_permits)) = (channel(), channel());
        let (slow, failing) = (constrained(permits), constrained(no_permits));
        drop(broken);
        let error = ids(failing).unwrap_err().to_string();
        assert!(error.contains("slow"), "{error}");
        // All of these end although the slow one has no mask yet.
        for _ in 0..2 {
            assert_eq!(ids(engine.submit(request(20)).unwrap()).unwrap(), alone);
            assert_eq!(slow.usage().completion_tokens, 0);
        }
        (0..20).for_each(|_| permit.send(()).unwrap());
        assert_eq!(ids(slow).unwrap(), alone);
        assert_eq!((engine.stats().n_finished, engine.stats().n_failed), (4, 1));
        engine.close();
        thread.join().unwrap();
    }
}
