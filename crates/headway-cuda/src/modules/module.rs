//! An open module: its file, symbols and numbers of arguments were checked once.

use super::{
    Arg, Entry, ModuleError, ModuleFolder, Returned,
    call::Function,
    library::{Library, Linking},
    shim,
};
use headway_ffi_shim::tvm::SafeCall;
use std::{
    collections::HashMap,
    ffi::c_void,
    path::{Path, PathBuf},
    ptr::null_mut,
    sync::{Arc, Mutex, PoisonError},
};

/// A module whose functions can be called.
#[derive(Debug)]
pub struct Module {
    path: PathBuf,
    entry: Entry,
    functions: Vec<Function>,
}

impl Module {
    /// Opens a folder's module for a device of this architecture (`None`: it is not run), once a process.
    ///
    /// # Errors
    /// A file that is not what the manifest says or not for the device; a module that can't be opened, lacks a
    /// function, or whose functions take other arguments; no shim.
    pub fn open(folder: &ModuleFolder, entry: &Entry, arch: Option<&str>) -> Result<Arc<Self>, ModuleError> {
        static OPEN: Mutex<Option<HashMap<PathBuf, Arc<Module>>>> = Mutex::new(None);
        let path = folder.file(entry);
        if let Some(device) = arch.filter(|a| *a != entry.arch) {
            return Err(ModuleError::Arch { path, found: entry.arch.clone(), device: device.into() });
        }
        let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        let open = open.get_or_insert_default();
        if let Some(module) = open.get(&path).filter(|m| m.entry == *entry) {
            return Ok(Arc::clone(module));
        }
        folder.check(entry)?;
        let module = Arc::new(Self::load(&path, entry)?);
        open.insert(path, Arc::clone(&module));
        Ok(module)
    }

    fn load(path: &Path, entry: &Entry) -> Result<Self, ModuleError> {
        let library = library(path)?;
        let mut functions = vec![];
        for &(name, expected) in entry.kind.functions() {
            let function = function(&library, path, name)?;
            let found = arity(&function, path)?;
            if found != expected.to_string() {
                return Err(ModuleError::Arguments {
                    path: path.to_owned(),
                    function: name.into(),
                    found,
                    expected,
                    listed: false,
                });
            }
            functions.push(function);
        }
        Ok(Self { path: path.to_owned(), entry: entry.clone(), functions })
    }

    /// The numbers of arguments that a file's functions take, for its entry.
    ///
    /// # Errors
    /// As [`Module::open`].
    pub fn arities(
        path: &Path,
        names: &[(&'static str, usize)],
    ) -> Result<Vec<(String, usize)>, ModuleError> {
        let library = library(path)?;
        let of = |&(name, expected): &(&'static str, usize)| {
            let found = arity(&function(&library, path, name)?, path)?;
            let wrong = |found| ModuleError::Arguments {
                path: path.to_owned(),
                function: name.into(),
                found,
                expected,
                listed: false,
            };
            found.parse().map(|n| (name.to_owned(), n)).map_err(|_| wrong(found))
        };
        names.iter().map(of).collect()
    }

    /// Its entry.
    pub fn entry(&self) -> &Entry {
        &self.entry
    }

    /// Calls a function on a stream.
    ///
    /// # Errors
    /// A function that such modules don't have; what it raised.
    ///
    /// # Safety
    /// As [`Function::call`].
    pub unsafe fn call(
        &self,
        name: &str,
        device: u32,
        stream: *mut c_void,
        args: &[Arg<'_>],
    ) -> Result<Returned, ModuleError> {
        let Some(function) = self.functions.iter().find(|f| f.name == name) else {
            return Err(ModuleError::NoSymbol { path: self.path.clone(), symbol: name.into() });
        };
        // SAFETY: the caller's word.
        unsafe { function.call(&self.path, device, stream, args) }
    }

    /// Something else came back than such a function returns.
    pub fn unexpected(&self, function: &str, found: &Returned, expected: &str) -> ModuleError {
        ModuleError::Result {
            path: self.path.clone(),
            function: function.into(),
            found: format!("{found:?}"),
            expected: expected.into(),
        }
    }
}

fn library(path: &Path) -> Result<Library, ModuleError> {
    // Its functions must be there before a module that imports them.
    shim()?;
    Library::open(path, Linking::LOCAL).map_err(|why| {
        let remedy = match why.contains("GLIBC") {
            true => "build it on this machine, whose system libraries are older, with headway kernels build flashinfer",
            false => "build it again with headway kernels build flashinfer",
        };
        ModuleError::Open { path: path.to_owned(), why, remedy: remedy.into() }
    })
}

fn function(library: &Library, path: &Path, name: &'static str) -> Result<Function, ModuleError> {
    let symbol = format!("__tvm_ffi_{name}");
    let Some(at) = library.symbol(&symbol) else {
        return Err(ModuleError::NoSymbol { path: path.to_owned(), symbol });
    };
    // SAFETY: every symbol that begins like this has this signature.
    let call = unsafe { std::mem::transmute::<*mut c_void, SafeCall>(at) };
    Ok(Function { name, call })
}

/// How many arguments a function takes. It counts them before anything else, and its error says how many it expected.
fn arity(function: &Function, path: &Path) -> Result<String, ModuleError> {
    // SAFETY: without arguments it only raises an error, or has none to take.
    match unsafe { function.call(path, 0, null_mut(), &[]) } {
        Ok(_) => Ok("0".into()),
        Err(ModuleError::Raised { message, .. }) => {
            let digits = message.rsplit_once("Expected ").map(|(_, rest)| rest);
            let digits = digits.and_then(|d| d.split(|c: char| !c.is_ascii_digit()).next());
            Ok(digits.filter(|d| !d.is_empty()).unwrap_or("no known number of").into())
        }
        Err(e) => Err(e),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::modules::TensorArg;
    use std::process::Command;

    /// The fake module of the tests, for calls.
    fn fake(macros: &[&str]) -> (tempfile::TempDir, Library, Function, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/modules/fake.c");
        let path = dir.path().join("fake.so");
        let mut cc = Command::new(std::env::var("CC").unwrap_or_else(|_| "cc".into()));
        cc.args(["-shared", "-fPIC", "-DPLAN=2", "-DRUN=0", "-o"]).arg(&path).arg(source).args(macros);
        assert!(cc.status().unwrap().success());
        let library = super::library(&path).unwrap();
        let plan = function(&library, &path, "plan").unwrap();
        (dir, library, plan, path)
    }

    fn alive(library: &Library) -> i32 {
        let at = library.symbol("fake_alive").unwrap();
        // SAFETY: the fake's own function, of this signature.
        unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn() -> i32>(at)() }
    }

    #[test]
    fn arguments_and_the_stream_get_there_and_results_are_released() {
        let (_dir, library, plan, path) = fake(&[]);
        let numbers = [1, 2, 3];
        let tensor = TensorArg::host(&numbers);
        // SAFETY: the fake takes any two values.
        let call = |args: &[Arg<'_>]| unsafe { plan.call(&path, 0, 0x77 as *mut c_void, args) };
        let result = call(&[Arg::Int(-5), Arg::Tensor(&tensor)]).unwrap();
        assert_eq!(result.ints(), Some(vec![-5, 0x77]));
        assert_eq!(alive(&library), 1);
        // An object as an argument stays the caller's.
        let again = call(&[Arg::Int(1), Arg::Object(&result)]).unwrap();
        drop(result);
        drop(again);
        assert_eq!(alive(&library), 0);
    }

    #[test]
    fn a_tuple_of_numbers_and_a_number_is_taken_apart() {
        let (_dir, library, plan, path) = fake(&["-DTUPLE"]);
        // SAFETY: as above.
        let call = |args: &[Arg<'_>]| unsafe { plan.call(&path, 0, null_mut(), args) }.unwrap();
        let tuple = call(&[Arg::Int(7), Arg::None]);
        assert_eq!((tuple.ints(), tuple.ints_and_int()), (None, Some((vec![7, 0], 48))));
        assert_eq!(alive(&library), 2);
        // Its list as an argument stays the tuple's; what is not there is none, whose payload is 0.
        let number = |args: &[Arg<'_>]| call(args).ints_and_int().unwrap().0[0];
        assert_ne!(number(&[Arg::Item(&tuple, 0), Arg::None]), 0);
        assert_eq!(number(&[Arg::Item(&tuple, 2), Arg::None]), 0);
        drop(tuple);
        assert_eq!(alive(&library), 0);
    }

    #[test]
    fn what_a_call_raises_names_the_file_and_the_function() {
        let (_dir, library, plan, path) = fake(&[]);
        // SAFETY: as above.
        let call = |args: &[Arg<'_>]| unsafe { plan.call(&path, 0, null_mut(), args) }.unwrap_err();
        let e = call(&[Arg::Int(99), Arg::None]);
        assert_eq!(
            e,
            ModuleError::Raised {
                path: path.clone(),
                function: "plan".into(),
                kind: "RuntimeError".into(),
                message: "Buffer overflow: 1 of 2".into()
            }
        );
        assert!(e.to_string().contains("fake.so: plan failed: RuntimeError: Buffer overflow"), "{e}");
        assert!(call(&[Arg::Bool(true)]).to_string().contains("Expected 2 but got 1"));
        assert!(call(&[Arg::Float(0.5); 33]).to_string().contains("of at most 32"));
        assert_eq!(alive(&library), 0);
        // SAFETY: refused before the call.
        let e = unsafe { plan.call(&path, 64, null_mut(), &[Arg::None; 2]) }.unwrap_err();
        assert!(e.to_string().contains("no stream for device 64"), "{e}");
    }
}
