//! Where the time of steps goes: a few readings of the clock a step, summed since start-up. On a device the host queues a
//! step and then waits for it: what it costs the host is all but `wait`.

use std::time::{Duration, Instant};

/// Sums over all steps. Everything but `forward` and `wait` is what a step costs outside the model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepTimes {
    /// Steps that ran.
    pub steps: u64,
    /// Those of them that were replays of captured graphs.
    pub replayed: u64,
    /// Choosing requests and handing out pages.
    pub schedule: Duration,
    /// Writing token ids, positions, lengths, block tables and slot mappings.
    pub inputs: Duration,
    /// Every attention group's metadata.
    pub metadata: Duration,
    /// The model, attention included; on a device queueing it.
    pub forward: Duration,
    /// On a device: waiting for what it gives, and copying that.
    pub wait: Duration,
    /// Choosing tokens, their text, and the scheduler's bookkeeping.
    pub sample: Duration,
}

impl StepTimes {
    /// What came since an earlier reading.
    pub fn since(&self, earlier: &Self) -> Self {
        Self {
            steps: self.steps.saturating_sub(earlier.steps),
            replayed: self.replayed.saturating_sub(earlier.replayed),
            schedule: self.schedule.saturating_sub(earlier.schedule),
            inputs: self.inputs.saturating_sub(earlier.inputs),
            metadata: self.metadata.saturating_sub(earlier.metadata),
            forward: self.forward.saturating_sub(earlier.forward),
            wait: self.wait.saturating_sub(earlier.wait),
            sample: self.sample.saturating_sub(earlier.sample),
        }
    }
}

/// A clock that is read at the end of each part.
pub(crate) struct Laps(Instant);

impl Laps {
    pub(crate) fn start() -> Self {
        Self(Instant::now())
    }

    /// Adds what has passed since the last reading.
    pub(crate) fn lap(&mut self, part: &mut Duration) {
        let now = Instant::now();
        *part += now - self.0;
        self.0 = now;
    }
}
