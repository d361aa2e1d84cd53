//! Which freed memory a recorded graph may still name. A graph keeps addresses, not owners: what was allocated
//! before a recording ended stays mapped until that graph is gone, so that no replay touches memory that is not ours.
//!
//! Arithmetic only; the driver's calls are in `memory` and `capture`.

/// The allocations and graphs of one device, by the order in which they came.
#[derive(Debug, Default)]
pub(super) struct Ledger {
    next_serial: u64,
    next_graph: u64,
    /// Recorded graphs, and the serial up to which each may name memory; being recorded: any.
    graphs: Vec<(u64, u64)>,
    /// Dropped by its owner, still mapped: serial and address.
    dead: Vec<(u64, u64)>,
}

impl Ledger {
    /// Number of a new allocation.
    pub fn allocated(&mut self) -> u64 {
        self.next_serial += 1;
        self.next_serial
    }

    /// An owner drops an allocation. Whether it is to be freed now.
    #[must_use]
    pub fn dropped(&mut self, serial: u64, addr: u64) -> bool {
        let now = serial > self.horizon();
        if !now {
            self.dead.push((serial, addr));
        }
        now
    }

    /// A recording begins. Its number.
    pub fn recording(&mut self) -> u64 {
        self.next_graph += 1;
        self.graphs.push((self.next_graph, u64::MAX));
        self.next_graph
    }

    /// A recording ends: what is allocated from now on it can't name.
    pub fn recorded(&mut self, graph: u64) {
        let serial = self.next_serial;
        self.graphs.iter_mut().filter(|g| g.0 == graph).for_each(|g| g.1 = serial);
    }

    /// A graph is gone. Addresses to free.
    #[must_use]
    pub fn forgotten(&mut self, graph: u64) -> Vec<u64> {
        self.graphs.retain(|g| g.0 != graph);
        let horizon = self.horizon();
        self.dead.extract_if(.., |d| d.0 > horizon).map(|d| d.1).collect()
    }

    /// The last serial that a graph may name.
    fn horizon(&self) -> u64 {
        self.graphs.iter().map(|g| g.1).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_lives_as_long_as_a_graph_that_may_name_it() {
        let mut l = Ledger::default();
        let (a, b) = (l.allocated(), l.allocated());
        assert!(l.dropped(a, 0xa));
        let first = l.recording();
        assert!(!l.dropped(b, 0xb));
        l.recorded(first);
        let c = l.allocated();
        let second = l.recording();
        l.recorded(second);
        let d = l.allocated();
        assert!(l.dropped(d, 0xd));
        assert!(!l.dropped(c, 0xc));
        assert!(l.forgotten(first).is_empty());
        assert_eq!(l.forgotten(second), [0xb, 0xc]);
        let e = l.allocated();
        assert!(l.dropped(e, 0xe));
    }

    #[test]
    fn the_last_graph_of_a_buffer_frees_it() {
        let mut l = Ledger::default();
        let early = l.allocated();
        let first = l.recording();
        l.recorded(first);
        let late = l.allocated();
        let second = l.recording();
        l.recorded(second);
        assert!(!l.dropped(late, 2) && !l.dropped(early, 1));
        assert_eq!(l.forgotten(second), [2]);
        assert_eq!(l.forgotten(first), [1]);
    }
}
