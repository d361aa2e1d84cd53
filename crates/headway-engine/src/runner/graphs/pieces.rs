//! A step as graphs between its mixers' kernels. To record it the forward pass runs once: where it comes to a kernel, a
//! graph ends and the next begins. To replay it the forward pass runs with operations that do nothing: where it comes to a
//! kernel, the next graph is launched and then the kernel, with the step's own metadata.

use super::silent::Silent;
use crate::models::decoder::{DecoderInput, Pieces};
use headway_attention::AttentionError;
use headway_tensor::{Exec, Graph, Graphs, Ops, Result};
use std::cell::{Cell, RefCell};

/// Graphs between kernels, with what they freeze of a step: everything else that they name is the decoder's.
pub(super) struct PieceGraphs {
    graphs: Vec<Box<dyn Graph>>,
    /// Addresses of the token ids and of their positions.
    inputs: [u64; 2],
}

fn addresses(input: &DecoderInput<'_>) -> [u64; 2] {
    [input.token_ids.addr(), input.positions.addr()]
}

impl PieceGraphs {
    /// Kernels, copies and fills of all.
    ///
    /// # Errors
    /// The device's own.
    pub fn nodes(&self) -> Result<usize> {
        self.graphs.iter().map(|g| g.nodes()).sum()
    }
}

/// Records graphs; no kernel of a mixer runs.
pub(super) struct Recorder<'a> {
    ops: &'a dyn Ops,
    graphs: &'a dyn Graphs,
    done: RefCell<Vec<Box<dyn Graph>>>,
}

impl<'a> Recorder<'a> {
    /// Records what `body` runs with the recorder. A failure in it ends the recording.
    ///
    /// # Errors
    /// `body`'s own; the device's.
    pub fn record<E: From<headway_tensor::TensorError>>(
        ops: &'a dyn Ops,
        graphs: &'a dyn Graphs,
        input: &DecoderInput<'_>,
        body: impl FnOnce(&Self) -> std::result::Result<(), E>,
    ) -> std::result::Result<PieceGraphs, E> {
        let recorder = Self { ops, graphs, done: RefCell::default() };
        graphs.begin_capture()?;
        let outcome = body(&recorder);
        // After a failure between two recordings there is none to end.
        let last = if ops.capturing() || outcome.is_ok() { Some(graphs.end_capture()) } else { None };
        outcome?;
        let mut all = recorder.done.into_inner();
        all.extend(last.transpose()?);
        Ok(PieceGraphs { graphs: all, inputs: addresses(input) })
    }
}

impl Pieces for Recorder<'_> {
    fn ops(&self) -> &dyn Ops {
        self.ops
    }

    fn kernel(
        &self,
        _: &mut dyn FnMut(&dyn Exec) -> std::result::Result<(), AttentionError>,
    ) -> std::result::Result<(), AttentionError> {
        let piece = self.graphs.end_capture()?;
        self.done.borrow_mut().push(piece);
        Ok(self.graphs.begin_capture()?)
    }
}

/// Launches graphs, and mixers' kernels between them.
pub(super) struct Player<'a> {
    ops: &'a dyn Ops,
    silent: Silent,
    pieces: &'a PieceGraphs,
    next: Cell<usize>,
}

impl<'a> Player<'a> {
    /// Plays pieces over a step's inputs.
    ///
    /// # Errors
    /// Inputs that are not where they were at capture.
    pub fn new(
        ops: &'a dyn Ops,
        pieces: &'a PieceGraphs,
        input: &DecoderInput<'_>,
    ) -> std::result::Result<Self, AttentionError> {
        if addresses(input) != pieces.inputs {
            return Err(AttentionError::Graph(
                "the step's tokens have other addresses than its graphs were captured with, so a replay would read \
                 what is not there; run with --graph-mode NONE and report this"
                    .into(),
            ));
        }
        Ok(Self { ops, silent: Silent(ops.device()), pieces, next: Cell::new(0) })
    }

    fn launch(&self) -> std::result::Result<(), AttentionError> {
        let index = self.next.replace(self.next.get() + 1);
        match self.pieces.graphs.get(index) {
            Some(graph) => Ok(graph.launch()?),
            None => Err(self.miscounted()),
        }
    }

    fn miscounted(&self) -> AttentionError {
        AttentionError::Graph(format!(
            "a step came to another number of kernels than the {} that its graphs were captured between; run with \
             --graph-mode NONE and report this",
            self.pieces.graphs.len() - 1
        ))
    }

    /// Launches what comes after the last kernel.
    ///
    /// # Errors
    /// Another number of kernels than at capture; the device's own.
    pub fn finish(&self) -> std::result::Result<(), AttentionError> {
        if self.next.get() + 1 != self.pieces.graphs.len() {
            return Err(self.miscounted());
        }
        self.launch()
    }
}

impl Pieces for Player<'_> {
    fn ops(&self) -> &dyn Ops {
        &self.silent
    }

    fn kernel(
        &self,
        run: &mut dyn FnMut(&dyn Exec) -> std::result::Result<(), AttentionError>,
    ) -> std::result::Result<(), AttentionError> {
        self.launch()?;
        run(self.ops)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use headway_cpu::{CpuExec, CpuOptions};
    use headway_tensor::{TensorError, View};
    use std::rc::Rc;

    type Log = Rc<RefCell<Vec<String>>>;

    /// Notes what is asked of it.
    struct Notes(Log, Cell<usize>);
    struct Piece(Log, usize);

    impl Graph for Piece {
        fn launch(&self) -> Result<()> {
            self.0.borrow_mut().push(format!("piece {}", self.1));
            Ok(())
        }
        fn nodes(&self) -> Result<usize> {
            Ok(2)
        }
    }

    impl Graphs for Notes {
        fn begin_capture(&self) -> Result<()> {
            self.0.borrow_mut().push("begin".into());
            Ok(())
        }
        fn end_capture(&self) -> Result<Box<dyn Graph>> {
            self.0.borrow_mut().push("end".into());
            Ok(Box::new(Piece(self.0.clone(), self.1.replace(self.1.get() + 1))))
        }
        fn free_bytes(&self) -> Result<u64> {
            Ok(0)
        }
    }

    fn input(tokens: &View<i32>) -> DecoderInput<'_> {
        let (token_ids, positions, logits_rows) = (tokens, tokens, tokens);
        DecoderInput { token_ids, positions, logits_rows, encoder: None, fast_prefill: None }
    }

    /// A forward pass with so many kernels.
    fn pass(pieces: &dyn Pieces, kernels: usize, log: &Log) -> std::result::Result<(), AttentionError> {
        (0..kernels).try_for_each(|k| {
            pieces.kernel(&mut |_| {
                log.borrow_mut().push(format!("kernel {k}"));
                Ok(())
            })
        })
    }

    #[test]
    fn kernels_run_between_the_pieces_and_not_while_these_are_recorded() {
        let ops = CpuExec::new(CpuOptions { threads: Some(1), ..CpuOptions::default() }).unwrap();
        let log = Log::default();
        let (graphs, tokens) = (Notes(log.clone(), Cell::new(0)), View::from_vec(vec![0]));
        let pieces = Recorder::record(&ops, &graphs, &input(&tokens), |r| pass(r, 2, &log)).unwrap();
        assert_eq!(log.take(), ["begin", "end", "begin", "end", "begin", "end"]);
        assert_eq!(pieces.nodes(), Ok(6));
        let player = Player::new(&ops, &pieces, &input(&tokens)).unwrap();
        pass(&player, 2, &log).unwrap();
        player.finish().unwrap();
        assert_eq!(log.take(), ["piece 0", "kernel 0", "piece 1", "kernel 1", "piece 2"]);
        // What the pieces don't fit is an error.
        for kernels in [1, 3] {
            let player = Player::new(&ops, &pieces, &input(&tokens)).unwrap();
            let outcome = pass(&player, kernels, &log).and_then(|()| player.finish());
            assert!(outcome.is_err_and(|e| e.to_string().contains("than the 2 that")), "{kernels}");
        }
        let elsewhere = View::from_vec(vec![0]);
        let e = Player::new(&ops, &pieces, &input(&elsewhere)).err().map(|e| e.to_string());
        assert!(e.is_some_and(|e| e.contains("other addresses")));
    }

    #[test]
    fn a_failure_is_what_comes_back() {
        let ops = CpuExec::new(CpuOptions { threads: Some(1), ..CpuOptions::default() }).unwrap();
        let (graphs, tokens) = (Notes(Log::default(), Cell::new(0)), View::from_vec(vec![0]));
        let failed = Recorder::record(&ops, &graphs, &input(&tokens), |_| {
            Err::<(), _>(TensorError::Unsupported("no".into()))
        });
        assert!(failed.is_err_and(|e| e.to_string() == "no"));
    }

    #[test]
    fn a_walk_over_recorded_operations_changes_nothing() {
        let silent = Silent(headway_tensor::Device::CPU);
        let mut x = headway_tensor::Tensor::from_slice(&silent_host(), &[1f32, 2.0], &[1, 2]).unwrap();
        silent.scale_and_cap(x.view_mut(), 3.0, None).unwrap();
        assert_eq!(x.host::<f32>().unwrap(), [1.0, 2.0]);
        assert!(silent.alloc(1).is_err() && silent.read(x.view(), &mut [0; 8]).is_err());
    }

    fn silent_host() -> CpuExec {
        CpuExec::new(CpuOptions { threads: Some(1), ..CpuOptions::default() }).unwrap()
    }
}
