//! A layer's tasks: first the convolution, by requests and channels, then the scan, by requests and heads of
//! one group. A task owns the parts of states and outputs that it writes.

use super::{
    Batch, Numbers, On, StateCache,
    conv::Taps,
    entry,
    plan::Request,
    scan::Chunk,
    shape::MAX_CONV_KERNEL,
    step::Token,
    workspace::{CHANNELS, HEADS, Inner, Worker},
};
use crate::{
    kernels::elementwise::{math::exp, rows::Rows},
    pool::SharedMut,
};
use headway_attention::{AttentionError, Result};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Fewer elements than this are computed by the calling thread alone.
const WORTH_A_REGION: usize = 1 << 14;

/// A worker's buffers; [`run`] refuses those that a panic left.
fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One call; `mix` has checked it.
struct Job<'a> {
    on: On<'a>,
    batch: &'a Batch<'a>,
    numbers: &'a Numbers,
    x: (&'a Rows, &'a [f32]),
    places: &'a StateCache,
    cache: SharedMut<'a, u8>,
    out: (&'a Rows, SharedMut<'a, f32>),
    /// Requests with new tokens.
    live: &'a [usize],
    workers: &'a [Mutex<Worker>],
}

/// Runs a layer whose arguments `mix` has checked.
pub(super) fn run(
    on: On<'_>,
    batch: &Batch<'_>,
    numbers: &Numbers,
    x: (&Rows, &[f32]),
    (places, bytes): (&StateCache, &mut [u8]),
    (ys, out): (&Rows, &mut [f32]),
) -> Result<()> {
    let broken = || AttentionError::Inputs("an earlier call of this group panicked".into());
    let mut inner = batch.workspace.inner.lock().map_err(|_| broken())?;
    let Inner { xbc, workers } = &mut *inner;
    if workers.iter().any(Mutex::is_poisoned) {
        return Err(broken());
    }
    let xbc: &mut [f32] = bytemuck::cast_slice_mut(xbc.as_bytes_mut());
    let job = Job {
        on,
        batch,
        numbers,
        x,
        places,
        cache: SharedMut::new(bytes),
        out: (ys, SharedMut::new(out)),
        live: batch.plan.live(),
        workers,
    };
    job.convolve(&SharedMut::new(&mut *xbc));
    job.scan(xbc);
    Ok(())
}

impl Job<'_> {
    /// Runs tasks as different workers, or one after another where that is faster.
    fn tasks(&self, tasks: usize, elements: usize, f: &(dyn Fn(usize, &mut Worker) + Sync)) {
        if elements < WORTH_A_REGION {
            let mut worker = lock(&self.workers[0]);
            return (0..tasks).for_each(|t| f(t, &mut worker));
        }
        self.on
            .pool
            .run(tasks, &|task, worker| f(task, &mut lock(&self.workers[worker % self.workers.len()])));
    }

    fn elements(&self, width: usize) -> usize {
        self.live.iter().map(|r| self.batch.plan.requests()[*r].rows.len()).sum::<usize>() * width
    }

    /// First byte of a request's page.
    fn page(&self, request: usize) -> usize {
        self.places.offset + self.batch.states.of(request) * self.places.block_stride
    }

    fn convolve(&self, xbc: &SharedMut<'_, f32>) {
        let channels = self.places.page.dims().conv_dim();
        let each = channels * self.live.len() / (4 * self.on.pool.threads());
        let width = each.next_multiple_of(16).clamp(256, CHANNELS).min(channels);
        let blocks = channels.div_ceil(width);
        self.tasks(self.live.len() * blocks, self.elements(channels), &|task, worker| {
            let first = task % blocks * width;
            self.convolve_channels(self.live[task / blocks], first..channels.min(first + width), xbc, worker);
        });
    }

    /// Some channels of a request: output and new state.
    fn convolve_channels(
        &self,
        index: usize,
        channels: std::ops::Range<usize>,
        xbc: &SharedMut<'_, f32>,
        worker: &mut Worker,
    ) {
        let (request, page) = (&self.batch.plan.requests()[index], &self.places.page);
        let (dims, elem, width) = (page.dims(), page.conv, channels.len());
        let (memory, conv_dim) = (dims.memory(), dims.conv_dim());
        let before = &mut worker.before[..memory * width];
        let of_state = |token: usize| {
            let first = self.page(index) + (token * conv_dim + channels.start) * elem.size();
            first..first + width * elem.size()
        };
        for (token, row) in before.chunks_exact_mut(width).enumerate() {
            if request.fresh {
                row.fill(0.0);
            } else {
                // SAFETY: these channels of the request's state are this task's: channels of different
                // tasks don't meet, and no two requests have one block (`States::fill`).
                elem.read(unsafe { self.cache.slice_mut(of_state(token)) }, row);
            }
        }
        let before = &*before;
        // Token −memory is the first of `before`, token 0 the request's first new one.
        let at = |token: usize| match token.checked_sub(memory) {
            None => &before[token * width..][..width],
            Some(new) => &self.x.0.of(self.x.1, request.rows.start + new)[channels.clone()],
        };
        let bias = &self.numbers.conv_bias[channels.clone()];
        let weight = &self.numbers.conv_weight[channels.start..];
        for (token, row) in request.rows.clone().enumerate() {
            let mut taps: Taps<'_> = [&[]; MAX_CONV_KERNEL];
            for (k, tap) in taps[..=memory].iter_mut().enumerate() {
                *tap = at(token + k);
            }
            let first = row * conv_dim + channels.start;
            // SAFETY: rows of different requests don't meet, nor do channels of different tasks.
            let out = unsafe { xbc.slice_mut(first..first + width) };
            entry::conv(self.on.isa, out, bias, weight, conv_dim, &taps, memory + 1);
        }
        for token in 0..memory {
            // SAFETY: as where the state was read.
            let state = unsafe { self.cache.slice_mut(of_state(token)) };
            elem.write(at(request.rows.len() + token), state);
        }
    }

    fn scan(&self, xbc: &[f32]) {
        let dims = self.places.page.dims();
        let enough = 2 * self.on.pool.threads();
        let most = (1..=HEADS.min(dims.heads_per_group()))
            .rev()
            .filter(|n| dims.heads_per_group().is_multiple_of(*n))
            .find(|n| *n == 1 || self.live.len() * (dims.heads / n) >= enough)
            .unwrap_or(1);
        let blocks = dims.heads / most;
        let elements = self.elements(dims.inner() * dims.state);
        self.tasks(self.live.len() * blocks, elements, &|task, worker| {
            // Prefills are last in the batch, and longest: they go first.
            let index = self.live[self.live.len() - 1 - task / blocks];
            let heads = (task % blocks * most, most);
            let request = &self.batch.plan.requests()[index];
            let rows = &xbc[request.rows.start * dims.conv_dim()..request.rows.end * dims.conv_dim()];
            if request.chunks.is_empty() || self.on.stepwise {
                self.steps(index, request, heads, rows);
            } else {
                self.chunks(index, request, heads, rows, worker);
            }
        });
    }

    /// Length of a token's step for a head: softplus of what the model says, within its limits.
    fn dt(&self, row: usize, head: usize) -> f32 {
        let n = self.numbers;
        let raw = self.x.0.of(self.x.1, row)[self.places.page.dims().conv_dim() + head] + n.dt_bias[head];
        let soft = if raw > 20.0 { raw } else { raw.exp().ln_1p() };
        soft.max(n.dt_limit.0).min(n.dt_limit.1)
    }

    /// A head's state, as bytes of the cache.
    ///
    /// # Safety
    /// One task at a time, of one request, asks for a head.
    #[expect(clippy::mut_from_ref, reason = "parts of the cache; the caller answers for their being apart")]
    unsafe fn state(&self, index: usize, head: usize) -> &mut [u8] {
        let page = &self.places.page;
        let first = self.page(index) + page.conv_bytes() + head * page.head_bytes();
        // SAFETY: as the caller has promised; no two requests have one block (`States::fill`).
        unsafe { self.cache.slice_mut(first..first + page.head_bytes()) }
    }

    /// A head's columns of an output row.
    ///
    /// # Safety
    /// As [`Job::state`].
    #[expect(clippy::mut_from_ref, reason = "parts of the output; the caller answers for their being apart")]
    unsafe fn output(&self, row: usize, head: usize) -> &mut [f32] {
        let width = self.places.page.dims().head_dim;
        let first = self.out.0.range(row).start + head * width;
        // SAFETY: as the caller has promised; rows don't meet (`Rows::new`).
        unsafe { self.out.1.slice_mut(first..first + width) }
    }

    /// Heads of a request, token by token.
    fn steps(&self, index: usize, request: &Request, heads: (usize, usize), rows: &[f32]) {
        let (page, numbers) = (&self.places.page, self.numbers);
        let dims = page.dims();
        let (b_at, n) = (dims.inner() + heads.0 / dims.heads_per_group() * dims.state, dims.state);
        for head in heads.0..heads.0 + heads.1 {
            // SAFETY: this task's head of this request.
            let state = unsafe { self.state(index, head) };
            if request.fresh {
                // Every element type has zero as zero bytes.
                state.fill(0);
            }
            for (row, xbc) in request.rows.clone().zip(rows.chunks_exact(dims.conv_dim())) {
                let dt = self.dt(row, head);
                let token = Token {
                    x: &xbc[head * dims.head_dim..][..dims.head_dim],
                    b: &xbc[b_at..][..n],
                    c: &xbc[b_at + dims.groups * n..][..n],
                    dt,
                    decay: exp(dt * numbers.a[head]),
                    d: numbers.d[head],
                };
                // SAFETY: as above.
                let y = unsafe { self.output(row, head) };
                entry::step(self.on.isa, page.ssm, state, &token, y);
            }
        }
    }

    /// Heads of a request, chunk by chunk.
    fn chunks(
        &self,
        index: usize,
        request: &Request,
        heads: (usize, usize),
        rows: &[f32],
        worker: &mut Worker,
    ) {
        let (page, room) = (&self.places.page, &self.batch.workspace.room);
        let dims = page.dims();
        let Worker { state, scan, .. } = worker;
        let turned = dims.state * room.elements;
        if !request.fresh {
            for (h, to) in scan.states.chunks_mut(turned).take(heads.1).enumerate() {
                // SAFETY: this task's head of this request.
                page.ssm.read(unsafe { self.state(index, heads.0 + h) }, state);
                for (p, row) in state.chunks_exact(dims.state).enumerate() {
                    row.iter().enumerate().for_each(|(n, s)| to[n * room.elements + p] = *s);
                }
            }
        }
        let mut done = 0;
        for &len in &self.batch.plan.chunks()[request.chunks.clone()] {
            let first = request.rows.start + done;
            // Taken out for as long as the rest of the buffers is written.
            let mut dt = std::mem::take(&mut scan.dt);
            for (h, dt) in dt.chunks_mut(room.chunk).take(heads.1).enumerate() {
                dt[..len].iter_mut().enumerate().for_each(|(t, dt)| *dt = self.dt(first + t, heads.0 + h));
            }
            let chunk = Chunk {
                rows: &rows[done * dims.conv_dim()..],
                len,
                dt: &dt,
                a: &self.numbers.a,
                heads,
                fresh: request.fresh && done == 0,
            };
            entry::chunk(self.on.isa, dims, room, &chunk, scan);
            scan.dt = dt;
            for h in 0..heads.1 {
                let (head, y) = (heads.0 + h, &scan.y[h * room.chunk * room.elements..]);
                let d = self.numbers.d[head];
                for (t, y) in y.chunks(room.elements).take(len).enumerate() {
                    // SAFETY: as above.
                    let out = unsafe { self.output(first + t, head) };
                    let x = &rows[(done + t) * dims.conv_dim() + head * dims.head_dim..];
                    out.iter_mut().zip(y).zip(x).for_each(|((o, y), x)| *o = d * x + y);
                }
            }
            done += len;
        }
        for (h, from) in scan.states.chunks(turned).take(heads.1).enumerate() {
            for (p, row) in state.chunks_exact_mut(dims.state).enumerate() {
                row.iter_mut().enumerate().for_each(|(n, s)| *s = from[n * room.elements + p]);
            }
            // SAFETY: as above.
            page.ssm.write(state, unsafe { self.state(index, heads.0 + h) });
        }
    }
}
