/* A module as FlashInfer's are seen from outside: two functions that count their arguments, and an error object for
   any other number. PLAN and RUN are the numbers; a negative one leaves the function out. RUN_NAME is the second one's
   symbol; with TUPLE the first returns an array in an array, as plans of latent attention do. */
#include <stdint.h>
#include <stdlib.h>
#include <stdio.h>
#include <string.h>

typedef struct { int32_t type_index; uint32_t small_len; uint64_t payload; } Any;
typedef struct Object { uint64_t counts; int32_t type_index; uint32_t pad; void (*deleter)(struct Object*, int); } Object;
typedef struct { const char* data; size_t size; } Bytes;
typedef struct { Object object; Bytes kind, message; char text[160]; } Error;
typedef struct { Object object; Any* data; int64_t size, capacity; void (*data_deleter)(void*); Any items[4]; } Array;

void TVMFFIErrorSetRaised(Object* error);
void* TVMFFIEnvGetStream(int32_t type, int32_t device);
#ifdef IMPORTS
void IMPORTS(void);
#endif

#ifndef RUN_NAME
#define RUN_NAME __tvm_ffi_paged_run
#endif

static int alive;
int fake_alive(void) { return alive; }

static void end(Object* object, int what) {
  if (what & 2) { free(object); alive -= 1; }
}

static void end_tuple(Object* object, int what) {
  Object* inner = (Object*)(uintptr_t)((Array*)object)->items[0].payload;
  if ((what & 1) && --inner->counts == 1ull << 32) end(inner, 3);
  end(object, what);
}

static int raise(const char* kind, const char* format, int a, int b) {
  Error* e = calloc(1, sizeof *e);
  alive += 1;
  e->object = (Object){.counts = 1 | (1ull << 32), .type_index = 67, .deleter = end};
  snprintf(e->text, sizeof e->text, format, a, b);
  e->kind = (Bytes){kind, strlen(kind)};
  e->message = (Bytes){e->text, strlen(e->text)};
  TVMFFIErrorSetRaised(&e->object);
  /* As a thrown error is when its catch block ends. */
  if (--e->object.counts == 1ull << 32) end(&e->object, 3);
  return -1;
}

#if PLAN >= 0
int __tvm_ffi_plan(void* self, const Any* args, int32_t n, Any* result) {
#ifdef IMPORTS
  IMPORTS();
#endif
  if (n != PLAN) return raise("TypeError", "Mismatched number of arguments when calling: `plan(0: int)`. Expected %d but got %d arguments", PLAN, n);
  if (args[0].payload == 99) return raise("RuntimeError", "Buffer overflow: %d of %d", 1, 2);
  Array* a = calloc(1, sizeof *a);
  alive += 1;
  a->object = (Object){.counts = 1 | (1ull << 32), .type_index = 71, .deleter = end};
  a->data = a->items;
  a->size = 2;
  a->items[0] = (Any){1, 0, args[0].payload};
  a->items[1] = (Any){1, 0, (uint64_t)(uintptr_t)TVMFFIEnvGetStream(2, 0)};
#ifdef TUPLE
  Array* list = a;
  a = calloc(1, sizeof *a);
  alive += 1;
  a->object = (Object){.counts = 1 | (1ull << 32), .type_index = 71, .deleter = end_tuple};
  a->data = a->items;
  a->size = 2;
  a->items[0] = (Any){71, 0, (uint64_t)(uintptr_t)list};
  a->items[1] = (Any){1, 0, 48};
#endif
  *result = (Any){71, 0, (uint64_t)(uintptr_t)a};
  return 0;
}
#endif
#if RUN >= 0
int RUN_NAME(void* self, const Any* args, int32_t n, Any* result) {
  if (n != RUN) return raise("TypeError", "Mismatched number of arguments when calling: `run(0: int)`. Expected %d but got %d arguments", RUN, n);
  return 0;
}
#endif
