//! Tests of the pool: every task once, panics carried, nesting, several callers.

use super::*;
use std::sync::atomic::AtomicU32;

fn pool(threads: usize) -> Pool {
    Pool::new(Some(threads)).unwrap()
}

#[test]
fn every_task_runs_once_whatever_the_number_of_threads() {
    for threads in 1..=4 {
        let pool = pool(threads);
        for tasks in [0usize, 1, 2, 3, 17, 1000] {
            for _ in 0..50 {
                let seen: Vec<AtomicU32> = (0..tasks).map(|_| AtomicU32::new(0)).collect();
                pool.run(tasks, &|task, worker| {
                    assert!(worker < threads);
                    seen[task].fetch_add(1, Relaxed);
                });
                assert!(seen.iter().all(|n| n.load(Relaxed) == 1), "{threads} threads, {tasks} tasks");
            }
        }
    }
}

#[test]
fn sleeping_workers_wake() {
    let pool = pool(3);
    for _ in 0..20 {
        thread::sleep(SPIN * 5);
        let sum = AtomicUsize::new(0);
        pool.run(30, &|task, _| {
            sum.fetch_add(task, Relaxed);
        });
        assert_eq!(sum.load(Relaxed), 435);
    }
}

#[test]
fn a_panic_reaches_the_caller_and_the_pool_lives_on() {
    for threads in 1..=3 {
        let pool = pool(threads);
        for round in 0..30 {
            let caught = catch_unwind(AssertUnwindSafe(|| {
                pool.run(20, &|task, _| assert!(task != round % 20, "task {task} fails"));
            }));
            let message = *caught.unwrap_err().downcast::<String>().unwrap();
            assert_eq!(message, format!("task {} fails", round % 20));
            let count = AtomicUsize::new(0);
            pool.run(20, &|_, _| {
                count.fetch_add(1, Relaxed);
            });
            assert_eq!(count.load(Relaxed), 20);
        }
    }
}

#[test]
fn a_region_inside_a_task_runs_inline_as_the_same_worker() {
    let pool = pool(3);
    let count = AtomicUsize::new(0);
    pool.run(8, &|_, outer| {
        let here = thread::current().id();
        pool.run(5, &|_, inner| {
            assert_eq!((inner, thread::current().id()), (outer, here));
            count.fetch_add(1, Relaxed);
        });
    });
    assert_eq!(count.load(Relaxed), 40);
}

#[test]
fn several_callers_take_turns() {
    let pool = pool(3);
    let busy: Vec<AtomicBool> = (0..3).map(|_| AtomicBool::new(false)).collect();
    let count = AtomicUsize::new(0);
    thread::scope(|s| {
        for _ in 0..4 {
            s.spawn(|| {
                for _ in 0..200 {
                    pool.run(7, &|_, worker| {
                        assert!(!busy[worker].swap(true, SeqCst), "two tasks as worker {worker}");
                        count.fetch_add(1, Relaxed);
                        busy[worker].store(false, SeqCst);
                    });
                }
            });
        }
    });
    assert_eq!(count.load(Relaxed), 4 * 200 * 7);
}

#[test]
fn chunks_cover_the_slice() {
    let pool = pool(2);
    let mut data = vec![0usize; 103];
    pool.run_chunks(&mut data, 10, &|i, chunk, _| {
        assert_eq!(chunk.len(), if i == 10 { 3 } else { 10 });
        chunk.fill(i + 1);
    });
    assert!(data.iter().enumerate().all(|(i, &x)| x == i / 10 + 1));
}

#[test]
fn impossible_thread_counts_are_refused() {
    assert!(Pool::new(Some(0)).unwrap_err().contains("0 threads"));
    assert!(Pool::new(Some(MAX_THREADS + 1)).is_err());
}
