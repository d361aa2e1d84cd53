//! How many threads are worth having: physical cores that this process may run on, within the CPU
//! quota of its control group, with the reason in words.
//!
//! Read once, at start-up, from `/proc` and `/sys`. Not for pinning threads: they inherit the mask.

use std::{collections::BTreeSet, fs, path::Path};

/// A number of threads and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cores {
    /// Threads worth having, at least 1.
    pub threads: usize,
    /// The reason, for people: what was found and what limits it.
    pub why: String,
}

/// The physical cores that this process may use, at most what its CPU quota pays for.
pub fn usable_cores() -> Cores {
    usable_cores_at(Path::new("/"))
}

/// [`usable_cores`] with `/proc` and `/sys` below `root`, so that it can be tested.
fn usable_cores_at(root: &Path) -> Cores {
    let status = fs::read_to_string(root.join("proc/self/status")).unwrap_or_default();
    let allowed = status.lines().find_map(|l| l.strip_prefix("Cpus_allowed_list:")).map(parse_list);
    let Some(cpus) = allowed.filter(|c| !c.is_empty()) else {
        let n = std::thread::available_parallelism().map_or(1, |n| n.get());
        return Cores { threads: n, why: format!("{n} threads: CPUs that the system reports") };
    };
    let cores = physical(root, &cpus);
    let mut why = format!("{cores} cores in the affinity mask ({} CPUs)", cpus.len());
    let quota = quota_v2(root).or_else(|| quota_v1(root));
    let threads = match quota {
        Some(q) if q < cores as f64 => {
            why += &format!(", control group quota of {q} CPUs");
            (q.floor() as usize).max(1)
        }
        _ => cores,
    };
    Cores { threads, why: format!("{threads} threads: {why}") }
}

/// `0-3,8` as numbers. Anything else in it is left out.
fn parse_list(text: &str) -> BTreeSet<usize> {
    let mut set = BTreeSet::new();
    for part in text.trim().split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        if let (Ok(first), Ok(last)) = (first.trim().parse(), last.trim().parse::<usize>()) {
            set.extend((first..=last).take(1 << 16));
        }
    }
    set
}

/// How many of `cpus` are on different physical cores.
fn physical(root: &Path, cpus: &BTreeSet<usize>) -> usize {
    let core_of = |cpu: &usize| {
        let file = format!("sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
        let siblings = fs::read_to_string(root.join(file)).ok()?;
        parse_list(&siblings).first().copied()
    };
    cpus.iter().map(|cpu| core_of(cpu).unwrap_or(*cpu)).collect::<BTreeSet<_>>().len()
}

/// The path of this process in the hierarchy of `controller` (empty: the unified one).
fn group_path(root: &Path, controller: &str) -> Option<String> {
    let text = fs::read_to_string(root.join("proc/self/cgroup")).ok()?;
    text.lines().find_map(|line| {
        let mut parts = line.splitn(3, ':').skip(1);
        let (controllers, path) = (parts.next()?, parts.next()?);
        controllers.split(',').any(|c| c == controller).then(|| path.trim_start_matches('/').to_owned())
    })
}

/// The smallest quota from the group at `path` below `mount` up to the mount itself. Inside a
/// container the path may be the host's, and only the mount is there.
fn smallest(mount: &Path, path: &str, read: impl Fn(&Path) -> Option<f64>) -> Option<f64> {
    let mut dir = mount.join(path);
    let mut least: Option<f64> = None;
    loop {
        if let Some(q) = read(&dir) {
            least = Some(least.map_or(q, |l| l.min(q)));
        }
        if dir == mount || !dir.pop() || !dir.starts_with(mount) {
            return least;
        }
    }
}

fn quota_v2(root: &Path) -> Option<f64> {
    let path = group_path(root, "")?;
    smallest(&root.join("sys/fs/cgroup"), &path, |dir| {
        let text = fs::read_to_string(dir.join("cpu.max")).ok()?;
        let (quota, period) = text.trim().split_once(' ')?;
        ratio(quota, period)
    })
}

fn quota_v1(root: &Path) -> Option<f64> {
    let path = group_path(root, "cpu")?;
    ["sys/fs/cgroup/cpu", "sys/fs/cgroup/cpu,cpuacct"].iter().find_map(|mount| {
        smallest(&root.join(mount), &path, |dir| {
            let quota = fs::read_to_string(dir.join("cpu.cfs_quota_us")).ok()?;
            let period = fs::read_to_string(dir.join("cpu.cfs_period_us")).ok()?;
            ratio(quota.trim(), period.trim())
        })
    })
}

/// `quota / period` where both are positive (`max` and −1 mean no limit).
fn ratio(quota: &str, period: &str) -> Option<f64> {
    let (quota, period): (f64, f64) = (quota.parse().ok()?, period.parse().ok()?);
    (quota > 0.0 && period > 0.0).then_some(quota / period)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A made-up `/proc` and `/sys`.
    struct Fake(tempfile::TempDir);

    impl Fake {
        fn new(allowed: &str, files: &[(&str, &str)]) -> Self {
            let fake = Self(tempfile::tempdir().unwrap());
            fake.put("proc/self/status", &format!("Name:\tx\nCpus_allowed_list:\t{allowed}\n"));
            for (path, text) in files {
                fake.put(path, text);
            }
            fake
        }

        fn put(&self, path: &str, text: &str) {
            let path = self.0.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }

        fn threads(&self) -> usize {
            usable_cores_at(self.0.path()).threads
        }
    }

    #[test]
    fn affinity_masks() {
        for (mask, n) in [("0", 1), ("0-3", 4), ("1,3,5", 3), ("0-1,4", 3)] {
            assert_eq!(Fake::new(mask, &[]).threads(), n, "{mask}");
        }
    }

    #[test]
    fn two_threads_of_a_core_count_once() {
        let fake = Fake::new("0-3", &[]);
        for (cpu, siblings) in [(0, "0,2"), (1, "1,3"), (2, "0,2"), (3, "1,3")] {
            fake.put(&format!("sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"), siblings);
        }
        assert_eq!(fake.threads(), 2);
    }

    #[test]
    fn a_quota_of_two_and_a_half_cpus() {
        let group = [("proc/self/cgroup", "0::/a/b\n"), ("sys/fs/cgroup/a/cpu.max", "250000 100000\n")];
        let cores = usable_cores_at(Fake::new("0-7", &group).0.path());
        assert_eq!(cores.threads, 2);
        assert!(cores.why.contains("2.5"), "{}", cores.why);
        let unlimited = [("proc/self/cgroup", "0::/\n"), ("sys/fs/cgroup/cpu.max", "max 100000\n")];
        assert_eq!(Fake::new("0-7", &unlimited).threads(), 8);
        let half = [("proc/self/cgroup", "0::/\n"), ("sys/fs/cgroup/cpu.max", "50000 100000\n")];
        assert_eq!(Fake::new("0-7", &half).threads(), 1);
    }

    #[test]
    fn the_first_version_of_control_groups() {
        let fake = Fake::new(
            "0-7",
            &[
                ("proc/self/cgroup", "5:memory:/x\n4:cpu,cpuacct:/docker/abc\n"),
                ("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "300000\n"),
                ("sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n"),
            ],
        );
        assert_eq!(fake.threads(), 3);
    }

    #[test]
    fn this_machine_has_at_least_one() {
        let cores = usable_cores();
        assert!(cores.threads >= 1 && cores.why.contains("threads"), "{cores:?}");
    }
}
