//! Timing: samples of back-to-back calls, without those in which the system took the processor away.

use std::time::Instant;

/// Seconds a call.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Timing {
    /// Of the middle sample.
    pub median: f64,
    /// Of the quickest.
    pub min: f64,
    /// Of the slowest.
    pub max: f64,
}

/// Seconds of calls before the first sample.
const WARM_UP: f64 = 0.5e-3;
/// Least seconds of a sample.
const SAMPLE: f64 = 6e-3;
/// Seconds of a call from which on it is warmed up once.
const LONG: f64 = 0.1;

/// Times one kind of call, in one go or a little at a time: calls go on counting, so that what they rotate
/// through does too.
#[derive(Debug, Default)]
pub struct Sampler {
    calls: usize,
    /// Seconds a call, of the first warm-up.
    first: Option<f64>,
}

impl Sampler {
    /// Times `call`, which is given a counter of calls. A sample is as many calls as take 6 ms; a sample in
    /// which a thread was preempted is taken again; where too few stay clean, the quicker half of all counts.
    /// `samples`: how many; `None` for 7, or fewer of calls over 0.1 s.
    ///
    /// # Errors
    /// The call's own.
    pub fn measure<E>(
        &mut self,
        samples: Option<usize>,
        mut call: impl FnMut(usize) -> Result<(), E>,
    ) -> Result<Timing, E> {
        let mut run = |n: usize| -> Result<f64, E> {
            let start = Instant::now();
            for _ in 0..n {
                call(self.calls)?;
                self.calls += 1;
            }
            Ok(start.elapsed().as_secs_f64())
        };
        let (mut warm, mut last) = (0.0, self.first.unwrap_or(0.0));
        // Later on, a call this long is no warm-up but the sample itself.
        while warm < WARM_UP && last < LONG {
            last = run(1)?;
            warm += last;
        }
        let call_s = *self.first.get_or_insert(last);
        let per_sample = (SAMPLE / call_s.max(1e-9)).ceil().clamp(1.0, 1e7) as usize;
        let wanted = samples.unwrap_or(match call_s {
            t if t > 0.3 => 3,
            t if t > 0.1 => 5,
            _ => 7,
        });
        let (mut clean, mut all) = (vec![], vec![]);
        while clean.len() < wanted && all.len() < 3 * wanted {
            let before = preemptions();
            let t = run(per_sample)? / per_sample as f64;
            if preemptions() == before {
                clean.push(t);
            }
            all.push(t);
        }
        if clean.len() < wanted {
            all.sort_by(f64::total_cmp);
            all.truncate(all.len().div_ceil(2));
            clean = all;
        }
        clean.sort_by(f64::total_cmp);
        Ok(Timing { median: clean[clean.len() / 2], min: clean[0], max: clean[clean.len() - 1] })
    }
}

/// How often the system took the processor from one of this process's threads; 0 where it doesn't say.
fn preemptions() -> u64 {
    let Ok(tasks) = std::fs::read_dir("/proc/self/task") else { return 0 };
    let of = |status: String| -> Option<u64> {
        let line = status.lines().find_map(|l| l.strip_prefix("nonvoluntary_ctxt_switches:"))?;
        line.trim().parse().ok()
    };
    let status = tasks.flatten().filter_map(|t| std::fs::read_to_string(t.path().join("status")).ok());
    status.filter_map(of).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn samples_are_ordered_and_count_calls() {
        let mut seen = vec![];
        let mut sampler = Sampler::default();
        let t = sampler
            .measure(None, |i| -> Result<(), ()> {
                seen.push(i);
                std::thread::sleep(Duration::from_millis(3));
                Ok(())
            })
            .unwrap();
        let more = |i| -> Result<(), ()> {
            seen.push(i);
            Ok(())
        };
        sampler.measure(Some(1), more).unwrap();
        assert!(t.min <= t.median && t.median <= t.max && t.min >= 3e-3, "{t:?}");
        assert!(seen.iter().copied().eq(0..seen.len()) && seen.len() >= 7);
    }

    #[test]
    fn a_failing_call_ends_it() {
        assert_eq!(Sampler::default().measure(None, |i| if i < 2 { Ok(()) } else { Err(i) }), Err(2));
    }
}
