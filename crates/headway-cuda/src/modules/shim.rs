//! The library with the functions that modules import ([`headway_ffi_shim`]): opened once, before any module.

use super::{
    ModuleError, elf,
    library::{Library, Linking},
};
use headway_ffi_shim::tvm::Object;
use std::{
    ffi::{c_int, c_void},
    path::{Path, PathBuf},
    sync::OnceLock,
};

/// What the functions that modules import begin with.
pub(super) const INTERFACES: [&str; 3] = ["TVMFFI", "aoti_torch_", "torch_"];
/// CUDA, as TVM-FFI numbers devices.
const CUDA: i32 = 2;

type SetStream = unsafe extern "C" fn(i32, i32, *mut c_void, *mut *mut c_void) -> c_int;
type MoveError = unsafe extern "C" fn(*mut *mut Object);

/// What callers of modules need of it.
#[derive(Debug)]
pub(crate) struct Shim {
    library: Library,
    set_stream: SetStream,
    move_error: MoveError,
}

static SHIM: OnceLock<Shim> = OnceLock::new();

/// Opens the shim at a path, for programs that do not lie beside it. A second call does nothing. Apache TVM-FFI's own
/// library has the same functions and will do.
///
/// # Errors
/// No such file; one that is something else; another library in the process whose functions modules would be given.
pub fn load_shim(path: impl AsRef<Path>) -> Result<(), ModuleError> {
    if SHIM.get().is_none() {
        let opened = open(path.as_ref())?;
        SHIM.get_or_init(|| opened);
    }
    Ok(())
}

/// The shim; where none was opened, the one beside this program.
pub(crate) fn shim() -> Result<&'static Shim, ModuleError> {
    if let Some(shim) = SHIM.get() {
        return Ok(shim);
    }
    let tried = places();
    let path = tried.iter().find(|p| p.is_file()).ok_or(ModuleError::NoShim { tried: tried.clone() })?;
    let opened = open(path)?;
    Ok(SHIM.get_or_init(|| opened))
}

/// Beside the program; where packages put libraries; where cargo leaves it.
fn places() -> Vec<PathBuf> {
    let program = std::env::current_exe().ok();
    let Some(folder) = program.as_deref().and_then(Path::parent) else { return vec![] };
    let of = |sub: &str| folder.join(sub).join(headway_ffi_shim::FILE);
    vec![of("."), of("../lib"), of("../lib/headway"), of("deps"), of("..")]
}

fn open(path: &Path) -> Result<Shim, ModuleError> {
    let remedy = || format!("give the path of {}", headway_ffi_shim::FILE);
    let wrong = |why| ModuleError::Open { path: path.to_owned(), why, remedy: remedy() };
    if !path.is_file() {
        return Err(wrong("there is no such file".into()));
    }
    let library = Library::open(path, Linking::GLOBAL).map_err(wrong)?;
    alone(path, &library)?;
    let find = |name: &str| library.symbol(name).ok_or_else(|| wrong(format!("it has no function {name}")));
    let (set_stream, move_error) = (find("TVMFFIEnvSetStream")?, find("TVMFFIErrorMoveFromRaised")?);
    // SAFETY: the symbols are TVM-FFI's, whose signatures these are.
    Ok(unsafe {
        Shim {
            library,
            set_stream: std::mem::transmute::<*mut c_void, SetStream>(set_stream),
            move_error: std::mem::transmute::<*mut c_void, MoveError>(move_error),
        }
    })
}

/// Refuses a process in which modules would be given another library's functions. The linker takes the first that it finds,
/// so what comes after the shim does no harm.
fn alone(path: &Path, library: &Library) -> Result<(), ModuleError> {
    let wrong = |why: String| ModuleError::Open {
        path: path.to_owned(),
        why,
        remedy: format!("give the path of {}", headway_ffi_shim::FILE),
    };
    let bytes = std::fs::read(path).map_err(|e| wrong(e.to_string()))?;
    let names = elf::check(&bytes).and_then(|()| elf::defined(&bytes)).map_err(|why| wrong(why.into()))?;
    let of_modules = |n: &&str| INTERFACES.iter().any(|i| n.starts_with(i));
    let other = |name: &str| {
        let first = Library::symbol_for_all(name)?;
        (Some(first) != library.symbol(name)).then(|| (name.to_owned(), first))
    };
    let mut others = names.into_iter().filter(of_modules).filter_map(other);
    let Some((symbol, at)) = others.next() else { return Ok(()) };
    let by = Library::file_of(at).unwrap_or_else(|| "a library without a name".into());
    Err(ModuleError::Shadowed { path: path.to_owned(), symbol, others: others.count(), by })
}

impl Shim {
    /// The address of one of its functions.
    pub fn symbol(&self, name: &str) -> Option<*mut c_void> {
        self.library.symbol(name)
    }

    /// Sets the stream that modules launch on in this thread. Whether the device's number is one that it keeps.
    pub fn set_stream(&self, device: u32, stream: *mut c_void) -> bool {
        let Ok(device) = i32::try_from(device) else { return false };
        // SAFETY: the stream is handed on as it is; nothing is written to a null place.
        unsafe { (self.set_stream)(CUDA, device, stream, std::ptr::null_mut()) == 0 }
    }

    /// Takes the error that this thread's last call raised, with its reference.
    pub fn raised(&self) -> *mut Object {
        let mut object = std::ptr::null_mut();
        // SAFETY: a place on the stack.
        unsafe { (self.move_error)(&mut object) };
        object
    }
}
