//! The thread pool of the CPU: worker threads made once, and parallel regions cheap enough for
//! hundreds a token. Lives as long as its [`crate::CpuExec`].
//!
//! A region is a number of tasks that are handed out by a counter; the calling thread takes part as
//! worker 0. Workers spin for a short while after a region and then sleep. A worker that wakes late
//! finds the region closed and does not hold it up.
//!
//! Not for input and output or for anything that blocks: tasks are arithmetic.

mod cores;
mod shared_mut;

pub use cores::{Cores, usable_cores};
pub use shared_mut::SharedMut;

use std::{
    any::Any,
    cell::Cell,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    ptr,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering::*},
    },
    thread::{self, JoinHandle, Thread},
    time::{Duration, Instant},
};

/// How long an idle worker spins before it sleeps: longer than what a step does between two regions.
const SPIN: Duration = Duration::from_micros(40);

/// The region is open: workers may enter. The bits below count the workers inside, those above are
/// the region's number.
const OPEN: u64 = 1 << 16;
const INSIDE: u64 = OPEN - 1;
const NEXT_REGION: u64 = 1 << 17;
/// More workers than this are not made; their count must fit below [`OPEN`].
const MAX_THREADS: usize = 1024;

/// A task: its index, and the index of the worker that runs it.
type Task<'a> = dyn Fn(usize, usize) + Sync + 'a;

thread_local! {
    /// The pool (by the address of its shared part) whose region this thread is in, and as which worker.
    static INSIDE_OF: Cell<(usize, usize)> = const { Cell::new((0, 0)) };
}

/// A `&Task` on the stack of the thread that opened a region.
struct Job<'a> {
    task: &'a Task<'a>,
}

struct Shared {
    /// Region number, [`OPEN`], workers inside.
    state: AtomicU64,
    /// The job of the open region.
    job: AtomicPtr<Job<'static>>,
    next: AtomicUsize,
    tasks: AtomicUsize,
    stop: AtomicBool,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    asleep: Box<[AtomicBool]>,
}

/// Worker threads for parallel regions.
pub struct Pool {
    shared: Arc<Shared>,
    workers: Vec<(JoinHandle<()>, Thread)>,
    /// One region at a time, whoever calls.
    turn: Mutex<()>,
    why: String,
}

fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Pool {
    /// A pool of `threads` threads in all, the calling one included; `None`: as many as there are
    /// usable physical cores ([`usable_cores`]).
    ///
    /// # Errors
    /// A sentence: zero or too many threads, or the system refuses to make one.
    pub fn new(threads: Option<usize>) -> Result<Self, String> {
        let (threads, why) = match threads {
            Some(n) => (n, format!("{n} threads: as asked")),
            None => {
                let cores = usable_cores();
                (cores.threads.min(MAX_THREADS), cores.why)
            }
        };
        if threads == 0 || threads > MAX_THREADS {
            return Err(format!("{threads} threads asked for; from 1 to {MAX_THREADS} are supported"));
        }
        let shared = Arc::new(Shared {
            state: AtomicU64::new(0),
            job: AtomicPtr::new(ptr::null_mut()),
            next: AtomicUsize::new(0),
            tasks: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
            panic: Mutex::new(None),
            asleep: (1..threads).map(|_| AtomicBool::new(false)).collect(),
        });
        let mut pool = Self { shared, workers: Vec::new(), turn: Mutex::new(()), why };
        for worker in 1..threads {
            let shared = Arc::clone(&pool.shared);
            let handle = thread::Builder::new()
                .name(format!("headway-{worker}"))
                .spawn(move || shared.work(worker))
                .map_err(|e| format!("worker thread {worker} of {threads} could not be started: {e}"))?;
            let thread = handle.thread().clone();
            pool.workers.push((handle, thread));
        }
        Ok(pool)
    }

    /// Threads that run tasks, the calling one included: worker indices are below this.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Why there are this many threads, for people.
    pub fn why(&self) -> String {
        self.why.clone()
    }

    /// Runs `f(task, worker)` once for each task in `0..tasks` and returns when all are done. No two
    /// tasks run at the same time as the same worker. Called from inside a task, the tasks run one
    /// after another on the calling thread, as its worker.
    ///
    /// # Panics
    /// When a task panics: with the first panic, after every running task has ended; tasks that had
    /// not begun are left out.
    pub fn run(&self, tasks: usize, f: &(dyn Fn(usize, usize) + Sync)) {
        let here = Arc::as_ptr(&self.shared) as usize;
        let (outer, worker) = INSIDE_OF.get();
        if outer == here {
            return (0..tasks).for_each(|t| f(t, worker));
        }
        if tasks == 0 {
            return;
        }
        let _turn = lock(&self.turn);
        let _inside = Inside::enter(here, 0);
        if tasks == 1 || self.workers.is_empty() {
            return (0..tasks).for_each(|t| f(t, 0));
        }
        self.region(tasks, f);
    }

    /// `data` in chunks of `chunk` elements (the last may be shorter): `f(chunk index, chunk, worker)`.
    ///
    /// # Panics
    /// As [`Pool::run`]; when `chunk` is zero.
    pub fn run_chunks<T: Send>(
        &self,
        data: &mut [T],
        chunk: usize,
        f: &(dyn Fn(usize, &mut [T], usize) + Sync),
    ) {
        assert!(chunk > 0, "chunks of no elements");
        let (len, data) = (data.len(), SharedMut::new(data));
        self.run(len.div_ceil(chunk), &|task, worker| {
            let range = task * chunk..len.min((task + 1) * chunk);
            // SAFETY: each task runs once, and the ranges of different tasks do not meet.
            f(task, unsafe { data.slice_mut(range) }, worker);
        });
    }

    fn region<'a>(&self, tasks: usize, f: &'a Task<'a>) {
        let shared = &*self.shared;
        let job = Job { task: f };
        shared.next.store(0, Relaxed);
        shared.tasks.store(tasks, Relaxed);
        shared.job.store((&raw const job).cast_mut().cast(), Relaxed);
        // Publishes the job; the total order with `asleep` decides who sees whom (see `work`).
        shared.state.fetch_add(NEXT_REGION | OPEN, SeqCst);
        for (asleep, (_, thread)) in shared.asleep.iter().zip(&self.workers).take(tasks - 1) {
            if asleep.load(SeqCst) {
                thread.unpark();
            }
        }
        shared.take_tasks(f, 0);
        shared.close();
        // `job` is on this stack frame: from here on nobody can reach it.
        let panic = lock(&shared.panic).take();
        if let Some(payload) = panic {
            resume_unwind(payload);
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, SeqCst);
        for (handle, thread) in self.workers.drain(..) {
            thread.unpark();
            // A worker catches the panics of tasks and has no other.
            let _ = handle.join();
        }
    }
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Pool({})", self.why)
    }
}

/// Marks this thread as inside a region, and takes the mark back when dropped.
struct Inside((usize, usize));

impl Inside {
    fn enter(pool: usize, worker: usize) -> Self {
        Self(INSIDE_OF.replace((pool, worker)))
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        INSIDE_OF.set(self.0);
    }
}

impl Shared {
    /// The life of a worker thread.
    fn work(&self, worker: usize) {
        let _inside = Inside::enter(ptr::from_ref(self) as usize, worker);
        let mut done = 0;
        while let Some(state) = self.wait_for_region(worker, done) {
            if self.state.compare_exchange(state, state + 1, AcqRel, Relaxed).is_err() {
                continue;
            }
            done = state / NEXT_REGION;
            // SAFETY: this worker is counted as inside an open region, so the thread that opened it is
            // still in `region` and waits in `close` until the count is back at zero: the job that it
            // stored before it opened the region is alive, and `Task` is `Sync`.
            let job = unsafe { &*self.job.load(Relaxed) };
            self.take_tasks(job.task, worker);
            self.state.fetch_sub(1, Release);
        }
    }

    /// Spins, then sleeps, until a region with a number other than `done` is open; `None`: stop.
    fn wait_for_region(&self, worker: usize, done: u64) -> Option<u64> {
        let mut since = None;
        loop {
            for _ in 0..64 {
                let state = self.state.load(Acquire);
                if state & OPEN != 0 && state / NEXT_REGION != done {
                    return Some(state);
                }
                std::hint::spin_loop();
            }
            if self.stop.load(Acquire) {
                return None;
            }
            if since.get_or_insert_with(Instant::now).elapsed() > SPIN {
                self.sleep(&self.asleep[worker - 1], done);
                since = None;
            }
        }
    }

    /// Sleeps unless a region has been opened. Either this thread sees the region here, or the one
    /// that opened it sees `asleep` and unparks: both sides write first and read second, `SeqCst`.
    fn sleep(&self, asleep: &AtomicBool, done: u64) {
        asleep.store(true, SeqCst);
        let state = self.state.load(SeqCst);
        let opened = state & OPEN != 0 && state / NEXT_REGION != done;
        if !opened && !self.stop.load(SeqCst) {
            thread::park();
        }
        asleep.store(false, SeqCst);
    }

    /// Runs tasks until there are none left; a panic ends the region for everybody.
    fn take_tasks(&self, f: &Task<'_>, worker: usize) {
        let tasks = self.tasks.load(Relaxed);
        let result = catch_unwind(AssertUnwindSafe(|| {
            loop {
                let task = self.next.fetch_add(1, Relaxed);
                if task >= tasks {
                    break;
                }
                f(task, worker);
            }
        }));
        if let Err(payload) = result {
            self.next.store(tasks, Relaxed);
            lock(&self.panic).get_or_insert(payload);
        }
    }

    /// Lets no further worker in and waits for those inside.
    fn close(&self) {
        let mut state = self.state.fetch_and(!OPEN, AcqRel);
        let mut since = None;
        while state & INSIDE != 0 {
            for _ in 0..64 {
                state = self.state.load(Acquire);
                if state & INSIDE == 0 {
                    return;
                }
                std::hint::spin_loop();
            }
            if since.get_or_insert_with(Instant::now).elapsed() > SPIN {
                thread::yield_now();
            }
        }
    }
}

#[cfg(test)]
mod tests;
