//! Layers of one shape, each over its own run of the activation rows, in one parallel region: the experts of a
//! mixture, whose rows lie sorted by expert. An expert's rows are one batch; an expert without rows is not touched.
//!
//! The sums of a row are [`CpuLinear`]'s, so they don't depend on how many rows a run has.

use super::{Call, CpuLinear, Plan, Vectors, with_activations};
use crate::{CpuExec, kernels::elementwise::rows::Rows, pool::SharedMut};

/// How a call is split: kept between calls, so that a step allocates nothing.
#[derive(Default)]
pub(crate) struct Runs(Vec<Run>);

/// One layer's rows.
struct Run {
    layer: usize,
    /// Its first activation row.
    first: usize,
    plan: Plan,
    /// Tasks of all runs up to this one, it included.
    tasks: usize,
}

impl Runs {
    /// Room for the runs of `layers` layers.
    pub(crate) fn with_room(layers: usize) -> Self {
        Self(Vec::with_capacity(layers))
    }

    /// `out = x · wᵀ + bias`, rows `offsets[l]..offsets[l + 1]` by layer l. The layers have one shape, which the
    /// callers have checked, as they have the offsets: they rise, from 0 to the number of rows.
    pub(crate) fn forward(
        &mut self,
        cx: &CpuExec,
        layers: &[CpuLinear],
        offsets: &[u32],
        x: &[f32],
        xs: &Rows,
        out: &mut [f32],
        outs: &Rows,
    ) {
        let Some(first) = layers.first() else { return };
        assert!(offsets.len() == layers.len() + 1 && offsets[layers.len()] as usize == xs.count());
        assert!(offsets.is_sorted() && layers.iter().all(|l| l.k == first.k && l.n == first.n));
        assert!(outs.count() == xs.count() && xs.width() == first.k && outs.width() == first.n);
        let (pool, mut tasks) = (cx.pool(), 0);
        self.0.clear();
        for (layer, run) in offsets.windows(2).enumerate().filter(|(_, run)| run[1] > run[0]) {
            let plan = Plan::new(&layers[layer], (run[1] - run[0]) as usize, pool.threads());
            tasks += plan.tasks();
            self.0.push(Run { layer, first: run[0] as usize, plan, tasks });
        }
        let packed = layers.iter().flat_map(CpuLinear::packed);
        let out = SharedMut::new(out);
        with_activations(cx, packed, x, xs, |converted| {
            let call = Call { vectors: Vectors::of(cx.isa()), x, xs, out, outs, converted };
            pool.run(tasks, &|task, _| {
                let at = self.0.partition_point(|run| run.tasks <= task);
                let run = &self.0[at];
                let before = at.checked_sub(1).map_or(0, |i| self.0[i].tasks);
                run.plan.run(&layers[run.layer], &call, run.first, task - before);
            });
        });
    }
}
